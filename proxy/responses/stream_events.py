"""The engine's stream of a response with every event and member that OpenAI's has. Pure.

The engine (build 10434) numbers neither events nor items, gives a call no id, ends no reasoning and
no arguments with an event of their own, and sends what it held back to the end (the start of a
mark, half a letter) only with the end. Client libraries look up items by `output_index`, add up
deltas, and stop at what they miss.

Source: tools/server/server-task.cpp of llama.cpp, build 10434; OpenAI's API reference, "Streaming
events"; openai-python 3.54, `types/responses/response_stream_event.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Final

from proxy.responses.event import Event, failed, written
from proxy.responses.output_item import (
    ARGUMENTS_DONE,
    DELTAS,
    PART_ADDED,
    PART_DONE,
    REASONING_DONE,
    Item,
    emptied,
    new_item,
)
from proxy.responses.response_object import begun, completed, item_of, part_of
from proxy.upstream.sse import InvalidEvent, Splitter, members_of

_BEGINNINGS: Final = frozenset({"response.created", "response.in_progress"})
# Sent when an item begins or ends, whether or not the engine sends them: a node does.
_OURS: Final = frozenset({PART_ADDED, PART_DONE, REASONING_DONE, ARGUMENTS_DONE})


class StreamEvents:
    """One stream.

    Args:
        base: The members of the response that repeat its request, `model` among them.
        response_id: Its id, where the engine leaves out its beginning.
        now: Unix time.
        on_complete: Gets the complete response, before the client can name it in a request.

    Attributes:
        is_over: Whether its last event was sent.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        response_id: str,
        now: int,
        on_complete: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self.is_over = False
        self._on_complete = on_complete
        self._base = base
        self._id = response_id
        self._created_at = now
        self._has_begun = False
        self._items: list[Item] = []
        self._numbered = 0
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes, return the client's; raises InvalidEvent."""
        return b"".join([self._mended(event) for event in self._splitter.feed(chunk)])

    def _mended(self, raw: bytes) -> bytes:
        try:
            event = members_of(raw.partition(b"\n")[2] if raw.startswith(b"event: ") else raw)
        except InvalidEvent:
            return raw
        if event is None:  # a comment
            return raw
        last = self._items[-1] if self._items else None
        try:
            if last and event.get("item_id") == last.id and event["type"] == last.delta:
                last.sent.append(event["delta"])  # nearly always
                return self._written({**last.place, **event})
            return b"".join([self._written(one) for one in self._events({**event})])
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of a response: {error!r}") from error

    def _written(self, event: Event) -> bytes:
        self._numbered += 1
        return written(event, self._numbered - 1)

    def _events(self, event: Event) -> Iterator[Event]:
        kind = event.get("type", "")
        if item_kind := DELTAS.get(kind):
            yield from self._delta(item_kind, event)
        elif kind in _BEGINNINGS:
            yield from self._begin(event.get("response", {}).get("id"))
            if "prompt_progress" in event:  # the client asked for it
                response = begun(self._base, self._id, self._created_at)
                yield {**event, "response": response}
        elif kind and "error" not in event and kind != "error":
            yield from self._begin(None)
            yield from self._other(kind, event)
        else:
            self.is_over = True
            yield failed(event)

    def _begin(self, response_id: str | None) -> Iterator[Event]:
        if self._has_begun:
            return
        self._has_begun = True
        self._id = response_id or self._id
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": begun(self._base, self._id, self._created_at)}

    def _delta(self, kind: str, event: Event) -> Iterator[Event]:
        item_id = event["item_id"]
        item = next((one for one in reversed(self._items) if one.id == item_id), None)
        if item is None:
            yield from self._begin(None)
            item = yield from self._add({"type": kind, "id": item_id})
        item.sent.append(event["delta"])
        yield {**item.place, **event}

    def _other(self, kind: str, event: Event) -> Iterator[Event]:
        match kind:
            case "response.output_item.added":
                yield from self._add(event["item"])
            case "response.output_text.done":
                item = yield from self._open({"type": "message", "id": event["item_id"]})
                yield from item.rest(event["text"])
                yield {**item.place, **event}
            case "response.content_part.done" if event["part"]["type"] == "output_text":
                item = yield from self._open({"type": "message", "id": event["item_id"]})
                yield item.part(PART_DONE, part_of(event["part"]))
            case "response.output_item.done":
                whole = item_of(event["item"])
                item = yield from self._open(whole)
                item.is_done = True
                yield from item.end(whole)
                yield {**event, "output_index": item.index, "item": whole}
            case "response.completed" | "response.incomplete":
                yield self._complete(event)
            case _ if kind not in _OURS:
                yield event

    def _add(self, given: Mapping[str, Any]) -> Generator[Event, None, Item]:
        item, events = new_item(given, len(self._items))
        self._items.append(item)
        yield from events
        return item

    def _open(self, given: Mapping[str, Any]) -> Generator[Event, None, Item]:
        """Return the first item of an id that has not ended; it begins where it has not begun."""
        found = [one for one in self._items if one.id == given["id"] and not one.is_done]
        return found[0] if found else (yield from self._add(emptied(given)))

    def _complete(self, event: Event) -> Event:
        given = event["response"]
        ended_at = given.get("completed_at") or given.get("created_at")
        own = {"id": self._id, "created_at": self._created_at, "completed_at": ended_at}
        response = completed(self._base, {**given, **own})
        self._on_complete(response)
        self.is_over = True
        return {**event, "type": f"response.{response['status']}", "response": response}
