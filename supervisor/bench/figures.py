"""The figures of a bench: name, unit, and which direction is better."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["s", "ms", "tokens/s", "tokens", "bytes", "J"]
_HIGHER_IS_BETTER: Final = frozenset({"tokens/s"})
_SEPARATOR: Final = "."


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        name: `WORKLOAD.what`, or `what` alone of the whole round.
        title: In words, without the workload and the unit.
        unit: Of the raw values.
    """

    name: str
    title: str
    unit: Unit

    @property
    def workload(self) -> str | None:
        """The workload it belongs to; None if to the whole round."""
        before, separator, _ = self.name.partition(_SEPARATOR)
        return before if separator else None

    @property
    def is_higher_better(self) -> bool:
        return self.unit in _HIGHER_IS_BETTER


READY: Final = Figure("ready_s", "time to ready", "s")
PEAK_MEMORY: Final = Figure("peak_memory", "peak memory", "bytes")
ENERGY: Final = Figure("energy", "energy per 1000 tokens", "J")
# Of a whole round.
ROUND_FIGURES: Final = (READY, PEAK_MEMORY, ENERGY)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated; `values` is not empty."""
    if len(values) == 1:
        return values[0]
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median_rate(rates: Sequence[float | None]) -> float | None:
    """The median of the rates that are known; None if none is."""
    known = [one for one in rates if one is not None]
    return statistics.median(known) if known else None
