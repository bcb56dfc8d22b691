"""Least squares with exponentially weighted samples and without negative coefficients. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

# Weight of all earlier samples after one more: the last fifteen make up two thirds.
_KEPT: Final = 0.93
# Draws coefficients that the samples say little about towards 0, most so all but the leading one.
_RIDGE: Final = 0.01
_LEADING_RIDGE: Final = 1e-6
_FIRST_SAMPLES: Final = 3
_LATEST_MAX: Final = 5
_SCALE_MAX: Final = 5.0


class LeastSquares:
    """Explains a figure as a sum of others, each times a coefficient of 0 and more.

    Relative errors count, so that small figures are met as well as large ones.

    Args:
        size: How many figures explain it.
        leading: The place of the one that explains most of it.
    """

    def __init__(self, size: int, leading: int) -> None:
        self.samples = 0
        self._size = size
        self._ridge = [_LEADING_RIDGE if at == leading else _RIDGE for at in range(size)]
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._solved: tuple[float, ...] | None = None
        self._latest: deque[tuple[Sequence[float], float]] = deque(maxlen=_LATEST_MAX)

    def add(self, row: Sequence[float], value: float) -> None:
        """Take a sample; `value` is above 0."""
        # By what was expected: by the value itself, low ones would count for more than high ones.
        expected = self._fit(row) if self.samples >= _FIRST_SAMPLES else value
        scale = min(max(expected, value / _SCALE_MAX), value * _SCALE_MAX)
        scaled = [one / scale for one in row]
        for at, one in enumerate(scaled):
            products = self._products[at]
            for other_at, other in enumerate(scaled):
                products[other_at] = _KEPT * products[other_at] + one * other
            self._targets[at] = _KEPT * self._targets[at] + one * value / scale
        self.samples += 1
        self._solved = None
        self._latest.append((row, value))

    @property
    def pace(self) -> float:
        """The latest samples as a multiple of what the coefficients say of them.

        A machine that other programs slow down changes all of them, faster than they are learned.
        """
        ratios = [value / self._fit(row) for row, value in self._latest if self._fit(row) > 0]
        return median(ratios) if len(ratios) >= _FIRST_SAMPLES else 1.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """All 0 before the first sample."""
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    @property
    def paced(self) -> tuple[float, ...]:
        """The coefficients at the pace of the latest samples."""
        pace = self.pace
        return tuple(pace * one for one in self.coefficients)

    def value(self, row: Sequence[float]) -> float:
        return self.pace * self._fit(row)

    def _fit(self, row: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.coefficients, row, strict=True))

    def _solve(self) -> tuple[float, ...]:
        used = [at for at in range(self._size) if self._products[at][at] > 0]
        found = [0.0] * self._size
        while used:
            matrix = [
                [self._products[a][b] * (1 + self._ridge[a] * (a == b)) for b in used]
                + [self._targets[a]]
                for a in used
            ]
            solution = _eliminate(matrix)
            lowest = min(range(len(used)), key=solution.__getitem__)
            if solution[lowest] >= 0:
                for at, coefficient in zip(used, solution, strict=True):
                    found[at] = coefficient
                break
            del used[lowest]
        return tuple(found)


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve linear equations, of a positive definite matrix with the right side behind it."""
    size = len(matrix)
    for at in range(size):
        for below in range(at + 1, size):
            factor = matrix[below][at] / matrix[at][at]
            for column in range(at, size + 1):
                matrix[below][column] -= factor * matrix[at][column]
    solution = [0.0] * size
    for at in reversed(range(size)):
        known = sum(matrix[at][column] * solution[column] for column in range(at + 1, size))
        solution[at] = (matrix[at][size] - known) / matrix[at][at]
    return solution
