"""One frame as text, laid out by rich."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from supervisor.output import one_line
from supervisor.top.layout import first_row, heights
from supervisor.top.order import ordered
from supervisor.top.rows import (
    INSTANCE_COLUMNS,
    REQUEST_COLUMNS,
    Column,
    instance_rows,
    request_row,
    summary,
)
from supervisor.top.sample import Sample
from supervisor.top.view import ORDERS, View

_KEYS: Final = "q quit · j k select · x cancel"
_SORT_KEYS: Final = " ".join(f"{key} {order}" for key, order in ORDERS.items())
_STYLES: Final = {"ready": "green", "up": "green", "failed": "red", "down": "red"}
_UNSTEADY_STYLES: Final = {"starting": "cyan", "backoff": "yellow", "unhealthy": "yellow"}
# Two lines of the daemon, one of notes, one of keys, and above each table an empty line and a head.
_OTHER_LINES: Final = 8
_MARK: Final = ">"
_ID_MAX_CELLS: Final = 30
# In a pipe no row is cut and no column left out.
_UNLIMITED: Final = 10_000


@dataclass(frozen=True, slots=True)
class Size:
    columns: int = _UNLIMITED
    rows: int = _UNLIMITED

    @property
    def is_unlimited(self) -> bool:
        return self.rows == _UNLIMITED


def once(sample: Sample, columns: int | None, *, has_colour: bool) -> str:
    """All rows, without a selection; `columns` of a terminal, None: as wide as they need."""
    area = Size(columns or _UNLIMITED)
    parts = [*_head(sample), *_tables(View(), sample, area)]
    return "\n".join(_lines(parts, area.columns, has_colour=has_colour))


def screen(view: View, sample: Sample, area: Size, *, has_colour: bool) -> list[str]:
    """The lines of a terminal, at most `area.rows`; the last one has the keys."""
    parts = [*_head(sample), *_tables(view, sample, area)]
    above = _lines(parts, area.columns, has_colour=has_colour)[: max(area.rows - 2, 0)]
    filling = [""] * (area.rows - 2 - len(above))
    below = _lines([_note(view), _keys(view)], area.columns, has_colour=has_colour)
    return [*above, *filling, *below][-max(area.rows, 1) :]


def _head(sample: Sample) -> Iterator[RenderableType]:
    if sample.status is None:
        yield Text(one_line(f"{sample.problem}; it is asked again"), "bold yellow")
        return
    daemon, load = summary(sample.status, sample.requests)
    yield Text(daemon, "bold")
    yield Text(load)


def _tables(view: View, sample: Sample, area: Size) -> Iterator[RenderableType]:
    if sample.status is None:
        return
    instances = instance_rows(sample.status, sample.requests)
    requests = ordered(sample.requests, view.order, is_reversed=view.is_reversed)
    space = heights(area.rows - _OTHER_LINES, len(instances), len(requests))
    yield Text("")
    yield _table(INSTANCE_COLUMNS, instances[: space.instances], area)
    hidden = len(instances) - space.instances
    yield Text(f"and {hidden} more" if hidden else "")
    chosen = next((i for i, one in enumerate(requests) if one["id"] == view.selected), None)
    first = first_row(chosen, len(requests), space.requests)
    listed = requests[first : first + space.requests]
    marked = -1 if chosen is None else chosen - first
    if requests:
        rows = [*map(request_row, listed)]
        yield _table(REQUEST_COLUMNS, rows if area.is_unlimited else _marked(rows, marked), area)
    else:
        yield Text("no request is in flight")


def _marked(rows: Iterable[tuple[str, ...]], marked: int) -> list[tuple[str, ...]]:
    """Mark one row by a character, which a terminal without styles shows too."""
    return [
        (f"{_MARK if number == marked else ' '} {row[0]}", *row[1:])
        for number, row in enumerate(rows)
    ]


def _table(columns: Sequence[Column], rows: Sequence[tuple[str, ...]], area: Size) -> Table:
    kept = [
        i
        for i, column in enumerate(columns)
        if area.columns >= column.from_width
        and (column.title != "PROBLEM" or any(row[i] for row in rows))
    ]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i in kept:
        _add_column(table, columns[i], area)
    for row in rows:
        style = "reverse" if row[0].startswith(_MARK) else None
        table.add_row(*(_cell(columns[i], row[i]) for i in kept), style=style)
    return table


def _add_column(table: Table, column: Column, area: Size) -> None:
    table.add_column(
        column.title,
        justify="right" if column.is_figure else "left",
        no_wrap=True,
        overflow="ellipsis",
        max_width=_ID_MAX_CELLS if column.title == "ID" and not area.is_unlimited else None,
    )


def _cell(column: Column, text: str) -> Text:
    if column.title == "STATE":
        word = text.partition(" ")[0]
        return Text(text, _STYLES.get(word) or _UNSTEADY_STYLES.get(word) or "")
    return Text(text, "red" if column.title == "PROBLEM" else "")


def _note(view: View) -> Text:
    if view.asking:
        return Text(one_line(f"cancel {view.asking}? y or n"), "bold yellow")
    return Text(one_line(view.note), "yellow")


def _keys(view: View) -> Text:
    chosen = f"by {view.order}{', reversed' if view.is_reversed else ''}"
    return Text(f"{_KEYS} · {chosen} · {_SORT_KEYS}", "dim")


def _lines(parts: Sequence[RenderableType], columns: int, *, has_colour: bool) -> list[str]:
    """Render parts, one line for each row: nothing wraps."""
    text = io.StringIO()
    console = Console(
        file=text,
        width=max(columns, 1),
        height=25,
        force_terminal=has_colour,
        color_system="standard" if has_colour else None,
        legacy_windows=False,
        highlight=False,
    )
    for part in parts:
        console.print(part, no_wrap=True, overflow="ellipsis", crop=True)
    return [line.rstrip() for line in text.getvalue().splitlines()]
