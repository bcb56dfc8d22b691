"""Writes values of a figure in a unit that suits their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.figures import Unit

# For each unit the units to choose from, the largest first: the smallest value that each is for,
# and how much one of it is.
_SCALES: Final[Mapping[Unit, Sequence[tuple[str, float, float]]]] = {
    "s": (("s", 1, 1), ("ms", 0, 1e-3)),
    "ms": (("s", 10_000, 1000), ("ms", 0, 1)),
    "bytes": (("GiB", 2**30, 2**30), ("MiB", 2**20, 2**20), ("KiB", 2**10, 2**10), ("B", 0, 1)),
    "J": (("kJ", 10_000, 1000), ("J", 0, 1)),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit in which values are written, and how much one of it is."""

    unit: str
    factor: float

    def number(self, value: float) -> str:
        """Write a value with three significant digits, or all before the point."""
        scaled = value / self.factor
        size = abs(scaled)
        # 99.95 and 9.995 round up to one digit more.
        digits = 0 if size >= 99.95 or not size else 1 if size >= 9.995 else 2
        return f"{scaled:.{digits}f}"

    def quantity(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}"


def scale_for(unit: Unit, values: Sequence[float]) -> Scale:
    """Choose the unit by the largest value, so that all values of a figure share it."""
    largest = max(map(abs, values), default=0.0)
    for name, start, factor in _SCALES.get(unit, ()):
        if largest >= start:
            return Scale(name, factor)
    return Scale(unit, 1)
