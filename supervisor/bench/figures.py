"""The figures of a bench: name, unit, and which direction is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Unit = Literal["s", "ms", "tokens/s", "tokens", "bytes", "J"]
_HIGHER_IS_BETTER: Final = frozenset({"tokens/s"})
_WORKLOAD_SEPARATOR: Final = "."


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        name: `WORKLOAD.what`, or `what` alone of the whole round.
        title: In words, without the workload and the unit.
        unit: Of the raw values; a duration has `ms` or `s`.
    """

    name: str
    title: str
    unit: Unit

    @property
    def workload(self) -> str | None:
        """The workload it belongs to; None if to the whole round."""
        before, separator, _ = self.name.partition(_WORKLOAD_SEPARATOR)
        return before if separator else None

    @property
    def is_higher_better(self) -> bool:
        return self.unit in _HIGHER_IS_BETTER
