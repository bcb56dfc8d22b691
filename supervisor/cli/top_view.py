"""Renders the frames of `corral top` from samples, and handles keys. Pure, except `try_read`."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from proxy.observe.past import RequestStats
from supervisor.cli.requests import IN_FLIGHT_LEAST, in_flight_row, short_id
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import (
    DEVICE_COLUMNS,
    DaemonStatus,
    InstanceStatus,
    ModelStatus,
    device_row,
    state_text,
)
from supervisor.errors import CorralError
from supervisor.output import duration, fit, hanging, one_line, size

_INSTANCES_MIN: Final = 3


def share_rows(rows: int, instances: int, requests: int) -> tuple[int, int]:
    """Return the rows for instances and for requests; half each if both need more."""
    rows = max(rows, 0)
    half = max(rows // 2, min(_INSTANCES_MIN, rows))
    shown = min(instances, max(half, rows - requests))
    return shown, min(requests, rows - shown)


def first_row(selected: int | None, count: int, rows: int) -> int:
    """Return the first row to list, so that the selected row is listed, central if possible."""
    if selected is None or count <= rows:
        return 0
    return min(max(selected - rows // 2, 0), count - rows)


Order = Literal["age", "model", "tokens/s", "tokens", "client", "phase"]

_PHASES: Final = (
    "reading",
    "queued",
    "loading",
    "prefill",
    "decode",
    "paused",
    "stalled",
    "ending",
)
# Sort keys, in the order of the keys to press; names ascend, figures descend.
_BY: Final[Mapping[Order, Callable[[RequestStats], Any]]] = {
    "age": lambda request: -request.age_s,
    "model": lambda request: request.model or "",
    "tokens/s": lambda request: -request.tokens_per_second,
    "tokens": lambda request: -request.decoded_tokens,
    "client": lambda request: request.client,
    "phase": lambda request: _PHASES.index(request.phase) if request.phase in _PHASES else -1,
}


def sort_requests(
    requests: Iterable[RequestStats], order: Order, *, is_reversed: bool = False
) -> list[RequestStats]:
    """Sort requests; equal requests by age, the oldest first."""
    by_age = sorted(requests, key=_BY["age"])
    return sorted(by_age, key=_BY[order], reverse=is_reversed)


@dataclass(frozen=True, slots=True)
class Sample:
    """Status and requests in flight, or a `problem`; `note`: result of a requested cancellation."""

    status: DaemonStatus | None = None
    requests: Sequence[RequestStats] = ()
    problem: str = ""
    note: str = ""


def try_read(client: Client, note: str = "") -> Sample:
    """Ask the daemon, with two requests."""
    try:
        return Sample(client.status(), client.requests(), note=note)
    except CorralError as error:
        return Sample(problem=error.message, note=note)


def cancel(client: Client, request_id: str) -> str:
    try:
        client.cancel_request(request_id)
    except CorralError as error:
        return error.message
    return f"cancelled {short_id(request_id)}"


ORDERS: Final[Mapping[str, Order]] = dict(zip("amtncp", _BY, strict=True))
_STEPS: Final = {"j": 1, "down": 1, "k": -1, "up": -1, "page down": 10, "page up": -10}


@dataclass(frozen=True, slots=True)
class View:
    """The state of the display."""

    order: Order = "age"
    is_reversed: bool = False
    ids: Sequence[str] = ()  # of the requests, in the order of the list
    selected: str | None = None
    asking: str | None = None  # id of the request whose cancellation the user must confirm
    note: str = ""  # a sentence to show until the next key
    daemon_pid: int | None = None
    is_end: bool = False


def with_sample(view: View, sample: Sample) -> View:
    """Update the view; if the selected request has ended, select the next one."""
    listed = sort_requests(sample.requests, view.order, is_reversed=view.is_reversed)
    ids = [request.id for request in listed]
    pid = sample.status.pid if sample.status else view.daemon_pid
    note = sample.note or view.note
    if view.daemon_pid is not None and pid != view.daemon_pid:
        note = "the daemon was started again"
    asking = view.asking if view.asking in ids else None
    if view.asking and not asking:
        note = f"{short_id(view.asking)} has ended"
    selected = view.selected
    if selected is not None and selected not in ids:
        selected = ids[min(view.ids.index(selected), len(ids) - 1)] if ids else None
    return replace(view, ids=ids, selected=selected, asking=asking, note=note, daemon_pid=pid)


def handle_key(view: View, key: str) -> tuple[View, str | None]:
    """Return the view after a key, and the id of a request to cancel."""
    if view.asking:
        is_yes = key in {"y", "Y"}
        note = "" if is_yes else "not cancelled"
        cancelled = view.asking if is_yes else None
        return replace(view, asking=None, note=note), cancelled
    view = replace(view, note="")
    if key in {"q", "Q"}:
        return replace(view, is_end=True), None
    if key == "x":
        note = "" if view.selected else "select a request first: j, k or the arrows"
        return replace(view, asking=view.selected, note=note), None
    if key in ORDERS:
        order = ORDERS[key]
        is_reversed = order == view.order and not view.is_reversed
        return replace(view, order=order, is_reversed=is_reversed), None
    return _select(view, key), None


def _select(view: View, key: str) -> View:
    if key == "escape":
        return replace(view, selected=None)
    if key not in _STEPS or not view.ids:
        return view
    step, last = _STEPS[key], len(view.ids) - 1
    if view.selected is None:
        return replace(view, selected=view.ids[0 if step > 0 else last])
    place = view.ids.index(view.selected) + step
    return replace(view, selected=view.ids[min(max(place, 0), last)])


_NONE: Final = "-"


INSTANCE_COLUMNS: Final = (
    *("MODEL", "QUEUED", "INSTANCE", "STATE", "SLOTS", "LOAD"),
    *("TOKENS/S", "MEMORY", "UP", "RESTARTS"),
)
# Columns that narrow terminals leave out, in this order; an instance's name has its model's name.
_INSTANCE_LEAST: Final = (
    *("RESTARTS", "UP", "MODEL", "MEMORY", "LOAD", "QUEUED", "TOKENS/S", "SLOTS"),
)
_BAR_CELLS: Final = 8
_FIGURES: Final = frozenset(
    ["QUEUED", "SLOTS", "SLOT", "TOKENS/S", "TOKENS", "MEMORY", "UP", "AGE", "RESTARTS"]
)


def summary(status: DaemonStatus, requests: Sequence[RequestStats]) -> tuple[str, str]:
    instances = [instance for model in status.models for instance in model.instances]
    ready = sum(instance.state == "ready" for instance in instances)
    queued = sum(request.phase == "queued" for request in requests)
    busy = sum(instance.slots_busy for instance in instances)
    slots = sum(instance.slots for instance in instances)
    rate = sum(_rates(requests).values())
    daemon = (
        f"llama-corral {status.version} · pid {status.pid} · up {duration(status.up_s)}"
        f" · {status.url}/v1{' · stopping' if status.stopping else ''}"
    )
    load = (
        f"{ready} of {len(instances)} instances ready · {busy} of {slots} slots busy · "
        f"{len(requests)} request{'' if len(requests) == 1 else 's'}, {queued} queued · "
        f"{rate:.1f} tokens/s"
    )
    return one_line(daemon), one_line(load)


def instance_rows(status: DaemonStatus, requests: Sequence[RequestStats]) -> list[tuple[str, ...]]:
    """Return the rows of instances, the first of each model with its queue; then those of nodes."""
    queued = Counter(request.model for request in requests if request.phase == "queued")
    rates = _rates(requests)
    rows = [row for model in status.models for row in _model_rows(model, queued[model.name], rates)]
    for node in status.nodes:
        cells = ("node", _NONE, node.name, node.state, f"{node.slots_busy}/{node.slots}")
        rows.append((*cells, _bar(node.slots_busy, node.slots), *[_NONE] * 4))
    return [_clean_cells(row) for row in rows]


def problems(status: DaemonStatus) -> list[str]:
    """Return a line for each model, instance and node that has a problem."""
    found: list[tuple[str, str]] = []
    for model in status.models:
        for instance in model.instances:
            error = instance.error
            text = error["message"] if error else next(iter(instance.warnings), "")
            found.append((instance.name, text))
        if not model.instances:
            found.append((model.name, model.reason or ""))
    found += ((node.name, node.reason or "") for node in status.nodes)
    return [one_line(f"{name}: {text}") for name, text in found if text]


def _bar(done: int, total: int) -> str:
    cells = min(total, _BAR_CELLS)
    full = -(-cells * done // total) if total else 0
    return "█" * full + "░" * (cells - full)


def _rates(requests: Iterable[RequestStats]) -> dict[str | None, float]:
    rates: dict[str | None, float] = {}
    for request in requests:
        if request.phase == "decode":
            rates[request.instance] = rates.get(request.instance, 0.0) + request.tokens_per_second
    return rates


def _model_rows(
    model: ModelStatus, queued: int, rates: Mapping[str | None, float]
) -> Iterator[tuple[str, ...]]:
    first = (model.name, str(queued))
    for instance in model.instances:
        yield *first, *_instance_cells(model, instance, rates.get(instance.name))
        first = ("", "")
    if not model.instances:
        yield *first, _NONE, model.state, *[_NONE] * 6


def _instance_cells(
    model: ModelStatus, instance: InstanceStatus, rate: float | None
) -> tuple[str, ...]:
    return (
        instance.name,
        state_text(model, instance),
        f"{instance.slots_busy}/{instance.slots}",
        _bar(instance.slots_busy, instance.slots),
        f"{rate:.1f}" if rate else _NONE,
        size(instance.memory_bytes),
        duration(instance.up_s),
        str(instance.restarts),
    )


def _clean_cells(cells: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, cells))


_KEYS: Final = "q quit · j k select · x cancel"
_SORT_KEYS: Final = " ".join(f"{key} {order}" for key, order in ORDERS.items())
_STYLES: Final = {
    "ready": "green",
    "up": "green",
    "failed": "red",
    "down": "red",
    "starting": "cyan",
    "backoff": "yellow",
    "unhealthy": "yellow",
}
# Two lines about the daemon, notes, keys, and above each table an empty line and a head.
_OTHER_LINES: Final = 8
_PROBLEM_LINES_MAX: Final = 4
_MARK: Final = ">"
# In a pipe, no row is cut and no column is left out.
_UNLIMITED: Final = 10_000


# Columns and rows.
Size = tuple[int, int]


def render_once(sample: Sample, columns: int | None, *, has_colour: bool) -> str:
    """Return all rows, without a selection; `columns`: None for as many as needed."""
    area = (columns or _UNLIMITED, _UNLIMITED)
    parts = [*_head(sample), *_tables(View(), sample, area)]
    return "\n".join(_lines(parts, area[0], has_colour=has_colour))


def screen(view: View, sample: Sample, area: Size, *, has_colour: bool) -> list[str]:
    """Return the lines for a terminal, at most its rows; the last line shows the keys."""
    columns, rows = area
    parts = [*_head(sample), *_tables(view, sample, area)]
    above = _lines(parts, columns, has_colour=has_colour)[: max(rows - 2, 0)]
    filling = [""] * (rows - 2 - len(above))
    order = f"by {view.order}{', reversed' if view.is_reversed else ''}"
    keys = Text(f"{_KEYS} · {order} · {_SORT_KEYS}", "dim")
    below = _lines([_note(view), keys], columns, has_colour=has_colour)
    return [*above, *filling, *below][-max(rows, 1) :]


def _head(sample: Sample) -> Iterator[RenderableType]:
    if sample.status is None:
        yield Text(one_line(f"{sample.problem}; retrying"), "bold yellow")
        return
    daemon, load = summary(sample.status, sample.requests)
    yield Text(daemon, "bold")
    yield Text(load)


def _tables(view: View, sample: Sample, area: Size) -> Iterator[RenderableType]:
    if sample.status is None:
        return
    instances = instance_rows(sample.status, sample.requests)
    requests = sort_requests(sample.requests, view.order, is_reversed=view.is_reversed)
    is_limited = area[1] != _UNLIMITED
    found = problems(sample.status)
    wrapped = [line for text in found for line in hanging("", text, area[0]).split("\n")]
    told = wrapped[:_PROBLEM_LINES_MAX] if is_limited else wrapped
    if len(told) < len(wrapped):
        told[-1] += " …"
    devices = [_clean_cells(device_row(device)) for device in sample.status.devices or ()]
    # With an empty line and the head.
    device_lines = len(devices) + 2 if devices else 0
    rows_left = area[1] - _OTHER_LINES - len(told) - device_lines
    instance_count, request_count = share_rows(rows_left, len(instances), len(requests))
    yield Text("")
    yield _table(INSTANCE_COLUMNS, instances[:instance_count], area, _INSTANCE_LEAST)
    for line in told:
        yield Text(line, "red")
    hidden = len(instances) - instance_count
    yield Text(f"and {hidden} more" if hidden else "")
    if devices:
        yield _table(DEVICE_COLUMNS, devices, area, ("TEMPERATURE",))
        yield Text("")
    chosen = next((i for i, request in enumerate(requests) if request.id == view.selected), None)
    first = first_row(chosen, len(requests), request_count)
    listed = [in_flight_row(request) for request in requests[first : first + request_count]]
    marked = -1 if chosen is None else chosen - first
    if listed:
        rows = [_clean_cells(row.values()) for row in listed]
        if area[0] != _UNLIMITED:
            # The mark is a character, which each terminal shows.
            marks = (_MARK if number == marked else " " for number in range(len(rows)))
            rows = [
                (f"{mark} {short_id(row[0])}", *row[1:])
                for mark, row in zip(marks, rows, strict=True)
            ]
        yield _table([*listed[0]], rows, area, IN_FLIGHT_LEAST)
    elif not requests:
        yield Text("no request is in flight")


def _table(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], area: Size, least: Sequence[str]
) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    titles, cells = fit(columns, rows, area[0], least)
    for number, title in enumerate(titles):
        longest = max(map(len, (title, *(row[number] for row in cells))))
        table.add_column(
            title,
            justify="right" if title in _FIGURES else "left",
            no_wrap=True,
            overflow="ellipsis",
            min_width=min(longest, area[0]),
        )
    for row in cells:
        style = "reverse" if row[0].startswith(_MARK) else None
        texts = (Text(text, _style(title, text)) for title, text in zip(titles, row, strict=True))
        table.add_row(*texts, style=style)
    return table


def _style(title: str, text: str) -> str:
    return _STYLES.get(text.partition(" ")[0], "") if title == "STATE" else ""


def _note(view: View) -> Text:
    if view.asking:
        return Text(one_line(f"cancel {short_id(view.asking)}? y or n"), "bold yellow")
    return Text(one_line(view.note), "yellow")


def _lines(parts: Sequence[RenderableType], columns: int, *, has_colour: bool) -> list[str]:
    """Render parts; each row is one line, and nothing wraps."""
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
