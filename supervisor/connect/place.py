"""Where a value stands in a settings file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Item:
    """The object of a list whose member has this value."""

    member: str
    value: str


Step = str | Item
Place = tuple[Step, ...]


class Absent(Enum):
    """That a file has no value at a place."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


def as_json(place: Place) -> list[Any]:
    return [one if isinstance(one, str) else {one.member: one.value} for one in place]


def from_json(steps: Sequence[Any]) -> Place:
    """Return the place that `as_json` wrote; raises TypeError or ValueError for another."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, str):
            found.append(step)
        else:
            ((member, value),) = step.items()
            found.append(Item(member, value))
    return tuple(found)


def nested(place: Place, value: Any) -> Any:
    """Return the value within the tables and lists that lead to it."""
    for step in reversed(place):
        value = {step: value} if isinstance(step, str) else [value]
    return value
