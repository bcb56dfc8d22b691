"""One item of a response's output while it is streamed, and the events about its content. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from proxy.responses.event import Event
from proxy.responses.response_object import item_of, part_of

PART_ADDED: Final = "response.content_part.added"
PART_DONE: Final = "response.content_part.done"
REASONING_DONE: Final = "response.reasoning_text.done"
ARGUMENTS_DONE: Final = "response.function_call_arguments.done"
# The kind of the item that a delta adds to.
DELTAS: Final = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}
_DELTA_OF: Final = {kind: delta for delta, kind in DELTAS.items()}
# An item that has nothing yet.
_EMPTY: Final[Mapping[str, Mapping[str, Any]]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}
# The part with which its content begins.
_FIRST_PART: Final[Mapping[str, Mapping[str, Any]]] = {
    "message": part_of({"type": "output_text", "text": ""}),
    "reasoning": {"type": "reasoning_text", "text": ""},
}


@dataclass(slots=True)
class Item:
    """One item.

    Attributes:
        place: What each event about its content says of it.
        sent: Its text or arguments so far.
        delta: The type of the events that add to it, or None.
    """

    id: str
    kind: str
    place: Mapping[str, Any]
    delta: str | None
    sent: list[str] = field(default_factory=list)
    is_done: bool = False

    @property
    def index(self) -> int:
        index: int = self.place["output_index"]
        return index

    def part(self, kind: str, part: Mapping[str, Any]) -> Event:
        """Return the event of this type about a part of its content."""
        place = {name: value for name, value in self.place.items() if name != "logprobs"}
        return {"type": kind, **place, "part": part}

    def rest(self, text: str) -> Iterator[Event]:
        """Yield the delta with what of the whole text no delta had."""
        sent = "".join(self.sent)
        if text.startswith(sent) and text != sent:
            self.sent = [text]
            yield {"type": self.delta, **self.place, "delta": text[len(sent) :]}

    def end(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that end its content, which the engine leaves out."""
        if self.kind == "reasoning":
            text = "".join(part.get("text", "") for part in whole.get("content") or ())
            yield from self.rest(text)
            yield {"type": REASONING_DONE, **self.place, "text": text}
            yield self.part(PART_DONE, {"type": "reasoning_text", "text": text})
        elif self.kind == "function_call":
            yield from self.rest(whole["arguments"])
            said = {"name": whole.get("name"), "arguments": whole["arguments"]}
            yield {"type": ARGUMENTS_DONE, **self.place, **said}


def new_item(given: Mapping[str, Any], index: int) -> tuple[Item, Iterator[Event]]:
    """Return an item, and the events with which it begins."""
    kind = given["type"]
    whole = {**_EMPTY.get(kind, {}), **item_of(given), "status": "in_progress"}
    item = Item(whole["id"], kind, _place(whole["id"], kind, index), _DELTA_OF.get(kind))
    return item, _beginning(item, whole)


def emptied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as it was before it had any content."""
    content = _EMPTY.get(given["type"], {})
    return {name: value for name, value in given.items() if name not in content}


def _beginning(item: Item, whole: Mapping[str, Any]) -> Iterator[Event]:
    yield {"type": "response.output_item.added", "output_index": item.index, "item": whole}
    if first := _FIRST_PART.get(item.kind):
        yield item.part(PART_ADDED, first)


def _place(item_id: str, kind: str, index: int) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": item_id, "output_index": index}
    if kind != "function_call":
        place["content_index"] = 0
    if kind == "message":
        place["logprobs"] = []
    return place
