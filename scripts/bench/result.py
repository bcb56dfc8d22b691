"""The result of one comparison: the same shape for every script, written and read as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure of all variants.

    Attributes:
        unit: Of the values; empty for a share or a count.
        values: One for each round, by variant; values of one place belong to the same round.
        base: The variant that the others are shown as multiples of; empty: no ratio is shown.
    """

    name: str
    unit: str
    values: Mapping[str, Sequence[float]]
    base: str = ""


@dataclass(frozen=True)
class Result:
    """All that one script found.

    Attributes:
        goals: Whether each goal was met, by its text with the measured value.
        not_measured: The reason, by the name of the missing program.
        notes: Sentences for the reader.
    """

    figures: Sequence[Figure]
    goals: Mapping[str, bool] = field(default_factory=dict)
    not_measured: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def missed(self) -> list[str]:
        return [goal for goal, is_met in self.goals.items() if not is_met]

    def write(self, path: Path | None) -> None:
        """Write it to a file, if one is named."""
        if path:
            path.write_bytes(_ADAPTER.dump_json(self, indent=1))


def read(path: Path) -> Result:
    """Read a file of `write`.

    Raises:
        OSError: There is no such file.
        ValueError: It is not a result.
    """
    return _ADAPTER.validate_json(path.read_bytes())


def one_round(name: str, unit: str, values: Mapping[str, float], base: str = "") -> Figure:
    """Return a figure that was measured once."""
    return Figure(name, unit, {variant: [value] for variant, value in values.items()}, base)


_ADAPTER: Final = TypeAdapter(Result)
