"""Which rows fit a terminal. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_INSTANCES_MIN: Final = 3


@dataclass(frozen=True, slots=True)
class Heights:
    """Rows of each table, without their heads."""

    instances: int
    requests: int


def heights(rows: int, instances: int, requests: int) -> Heights:
    """Share rows among two tables: half to each where both want more."""
    rows = max(rows, 0)
    half = max(rows // 2, min(_INSTANCES_MIN, rows))
    shown = min(instances, max(half, rows - requests))
    return Heights(shown, min(requests, rows - shown))


def first_row(selected: int | None, count: int, rows: int) -> int:
    """Return the first row to list, so that the selected one is listed, in the middle if it can."""
    if selected is None or count <= rows:
        return 0
    return min(max(selected - rows // 2, 0), count - rows)
