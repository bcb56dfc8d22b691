"""The axis of a plot: what it covers, its ticks, and where a value lies on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_TICKS: Final = 5
# Zero belongs on the axis where the values reach far enough down for it to cost little.
_ZERO_BELOW: Final = 0.35
_MARGIN: Final = 0.06
# How much of a single value, or of equal values, lies to either side of it.
_AROUND_EQUAL: Final = 0.05


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` at `left` to `high` at `right`."""

    low: float
    high: float
    left: float
    right: float

    def position(self, value: float) -> float:
        """Return where a value lies; one beyond the axis lies at its end."""
        share = (value - self.low) / (self.high - self.low)
        return self.left + max(0.0, min(1.0, share)) * (self.right - self.left)

    def ticks(self) -> list[tuple[float, str]]:
        """Return values at round steps, with what to write at each."""
        step = _round_step((self.high - self.low) / _TICKS)
        digits = max(0, -math.floor(math.log10(step)))
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]


def axis_over(values: Sequence[float], left: float, right: float) -> Axis:
    """Make an axis that holds all values, which are not negative."""
    low, high = min(values), max(values)
    if math.isclose(high, low):  # ticks between them would all be the same number
        around = high * _AROUND_EQUAL or 1
        return Axis(max(0.0, low - around), high + around, left, right)
    margin = (high - low) * _MARGIN
    return Axis(0.0 if low < high * _ZERO_BELOW else low - margin, high + margin, left, right)


def _round_step(least: float) -> float:
    """Return the next of 1, 2, 5, 10, 20 … times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
