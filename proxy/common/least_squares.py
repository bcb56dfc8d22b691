"""Least squares with exponentially weighted samples and non-negative coefficients. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

# Factor on the weight of earlier samples: the last fifteen make up two thirds.
_KEPT: Final = 0.93
# Pulls the coefficients to the assumed ones if the samples do not determine them.
_RIDGE: Final = 1e-4
_FIRST_SAMPLES: Final = 3
_LATEST_MAX: Final = 5
_SCALE_MAX: Final = 5.0


class LeastSquares:
    """Fits a value as a sum of regressors with coefficients of at least 0.

    Relative errors are minimised, so that small values fit as well as large ones. If few or similar
    samples leave coefficients open, the regressors that are large relative to their scale explain
    the value.

    Args:
        scales: For each regressor, an amount that contributes about as much as those of the others.
        assumed: The coefficients before any sample; None for all 0.
    """

    def __init__(self, scales: Sequence[float], assumed: Sequence[float] | None = None) -> None:
        self.samples = 0
        self._scales = scales
        self._assumed = assumed or [0.0] * len(scales)
        self._products = [[0.0] * len(scales) for _ in scales]
        self._targets = [0.0] * len(scales)
        self._solved: tuple[float, ...] | None = None
        self._pace: float | None = None
        self._latest: deque[tuple[Sequence[float], float]] = deque(maxlen=_LATEST_MAX)

    def add(self, row: Sequence[float], value: float) -> None:
        """Add a sample; `value` is above 0."""
        # Relative to the expected value: relative to the value itself, low values would dominate.
        expected = self._fit(row) if self.samples >= _FIRST_SAMPLES else value
        scale = min(max(expected, value / _SCALE_MAX), value * _SCALE_MAX)
        scaled = [
            regressor / unit / scale for regressor, unit in zip(row, self._scales, strict=True)
        ]
        assumed = sum(a * b for a, b in zip(self._assumed, row, strict=True))
        for at, regressor in enumerate(scaled):
            products = self._products[at]
            for other_at, other in enumerate(scaled):
                products[other_at] = _KEPT * products[other_at] + regressor * other
            self._targets[at] = _KEPT * self._targets[at] + regressor * (value - assumed) / scale
        self.samples += 1
        self._solved = self._pace = None
        self._latest.append((row, value))

    @property
    def pace(self) -> float:
        """Ratio of the latest samples to their predictions.

        If other programs slow the machine down, all samples change faster than coefficients adapt.
        """
        if self._pace is None:
            fits = [(value, self._fit(row)) for row, value in self._latest]
            ratios = [value / fit for value, fit in fits if fit > 0]
            self._pace = median(ratios) if len(ratios) >= _FIRST_SAMPLES else 1.0
        return self._pace

    @property
    def coefficients(self) -> tuple[float, ...]:
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def value(self, row: Sequence[float]) -> float:
        return self.pace * self._fit(row)

    def _fit(self, row: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.coefficients, row, strict=True))

    def _solve(self) -> tuple[float, ...]:
        # By coefficient that would be negative: the difference that makes it 0.
        nothing: dict[int, float] = {}
        while True:
            found = self._differences(nothing)
            both = zip(self._assumed, found, self._scales, strict=True)
            coefficients = [assumed + value / unit for assumed, value, unit in both]
            free = [at for at in range(len(found)) if at not in nothing]
            lowest = min(free, key=coefficients.__getitem__, default=0)
            if not free or coefficients[lowest] >= 0:
                return tuple(max(0.0, coefficient) for coefficient in coefficients)
            nothing[lowest] = -self._assumed[lowest] * self._scales[lowest]

    def _differences(self, fixed: Mapping[int, float]) -> list[float]:
        """Return the differences of the coefficients from the assumed ones, in their scales."""
        products = self._products
        free = [at for at in range(len(products)) if at not in fixed]
        ridge = _RIDGE * sum(products[at][at] for at in range(len(products)))
        if not ridge:
            return [0.0] * len(products)
        matrix = [
            [products[a][b] + ridge * (a == b) for b in free]
            + [
                self._targets[a]
                - sum(products[a][at] * coefficient for at, coefficient in fixed.items())
            ]
            for a in free
        ]
        solution = iter(_eliminate(matrix))
        return [fixed[at] if at in fixed else next(solution) for at in range(len(products))]


def _eliminate(matrix: list[list[float]]) -> list[float]:
    """Solve linear equations; `matrix` is positive definite, with the right side as last column."""
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
