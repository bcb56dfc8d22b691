"""What a person has chosen to see, and what a key does. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from supervisor.top.order import Order, ordered
from supervisor.top.sample import Sample

ORDERS: Final[Mapping[str, Order]] = {
    "a": "age",
    "m": "model",
    "t": "tokens/s",
    "n": "tokens",
    "c": "client",
    "p": "phase",
}
_STEPS: Final = {"j": 1, "down": 1, "k": -1, "up": -1, "page down": 10, "page up": -10}


@dataclass(frozen=True, slots=True)
class View:
    """One moment of the display.

    Attributes:
        ids: Of the requests, as they are listed.
        selected: Id of the selected request; None before one was selected.
        asking: Id of the request whose cancellation is to be confirmed.
        note: A sentence to show until the next key.
    """

    order: Order = "age"
    is_reversed: bool = False
    ids: Sequence[str] = ()
    selected: str | None = None
    asking: str | None = None
    note: str = ""
    daemon_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What a key leads to."""

    view: View
    is_end: bool = False
    cancelled: str | None = None


def with_sample(view: View, sample: Sample) -> View:
    """Take what the daemon says now; a selection moves on where its request has ended."""
    listed = ordered(sample.requests, view.order, is_reversed=view.is_reversed)
    ids = [one["id"] for one in listed]
    pid = sample.status["pid"] if sample.status else view.daemon_pid
    note = sample.note or view.note
    if view.daemon_pid is not None and pid != view.daemon_pid:
        note = "the daemon was started again"
    asking = view.asking if view.asking in ids else None
    if view.asking and not asking:
        note = f"{view.asking} has ended"
    selected = _kept(view, ids)
    return replace(view, ids=ids, selected=selected, asking=asking, note=note, daemon_pid=pid)


def _kept(view: View, ids: Sequence[str]) -> str | None:
    if view.selected is None or view.selected in ids:
        return view.selected
    return ids[min(view.ids.index(view.selected), len(ids) - 1)] if ids else None


def pressed(view: View, key: str) -> Step:
    if view.asking:
        is_yes = key in {"y", "Y"}
        note = "" if is_yes else "not cancelled"
        cancelled = view.asking if is_yes else None
        return Step(replace(view, asking=None, note=note), cancelled=cancelled)
    view = replace(view, note="")
    if key in {"q", "Q"}:
        return Step(view, is_end=True)
    if key == "x":
        return Step(_ask(view))
    if key in ORDERS:
        return Step(_sort(view, ORDERS[key]))
    return Step(_select(view, key))


def _ask(view: View) -> View:
    if view.selected:
        return replace(view, asking=view.selected)
    return replace(view, note="select a request first: j, k or the arrows")


def _sort(view: View, order: Order) -> View:
    return replace(view, order=order, is_reversed=order == view.order and not view.is_reversed)


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
