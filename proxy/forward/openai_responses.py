"""Completes a response of the Responses API with the events and members that OpenAI's has.

The engine (build 10434) omits members that repeat the request, and nearly all members in its first
events. It does not number events and items, gives calls no id, and sends no events that end
reasoning or arguments. It sends text that it holds back (the start of a stop string, an incomplete
character) only with the end. Client libraries look up items by `output_index`, add up deltas, and
fail if something is missing.

Source: tools/server/server-task.cpp of llama.cpp, build 10434; OpenAI's API reference, "The
response object" and "Streaming events"; openai-python 3.54, `types/responses`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

import orjson
from multidict import CIMultiDict

from proxy.forward.response import EventTransform
from proxy.http.api_formats import Event, error_as_event, event_bytes
from proxy.request.request import ProxyRequest
from proxy.request.stored_responses import StoredTurn
from proxy.upstream.http1 import InvalidEvent, members_of

# The members that repeat the request, with their defaults.
_REPEATED: Final[Mapping[str, Any]] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": None,
    "service_tier": None,
    "store": False,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
_CUT: Final = {"reason": "max_output_tokens"}


def request_members(members: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: members[name] for name in _REPEATED.keys() & members.keys()}
    return {**_REPEATED, **{name: value for name, value in given.items() if value is not None}}


def new_response(base: Mapping[str, Any], response_id: str, created_at: int) -> dict[str, Any]:
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **base,
    }


def complete_response(base: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's complete response with the members that it lacks.

    The engine does not report why it stopped. A response with the maximum of tokens was cut.
    """
    usage = _usage(response.get("usage") or {})
    limit = base.get("max_output_tokens")
    is_cut = isinstance(limit, int) and 0 < limit <= usage["output_tokens"]
    output = [item_of(item) for item in response.get("output") or ()]
    found = {**base, "error": None, **response, "output": output, "usage": usage}
    found["incomplete_details"] = _CUT if is_cut else None
    found["status"] = "incomplete" if is_cut else response.get("status", "completed")
    return found


def item_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of the output with the members that the engine omits."""
    found = {"status": "completed", **item}
    if item.get("type") == "function_call":
        found.setdefault("id", item.get("call_id"))
    return found


def part_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a message's content with the members that the engine omits."""
    return {"annotations": [], "logprobs": [], **part}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, **usage}
    cached = {"cached_tokens": 0, "cache_write_tokens": 0}
    tokens["input_tokens_details"] = {**cached, **(usage.get("input_tokens_details") or {})}
    reasoned = {"reasoning_tokens": 0}
    tokens["output_tokens_details"] = {**reasoned, **(usage.get("output_tokens_details") or {})}
    return tokens


PART_ADDED: Final = "response.content_part.added"
PART_DONE: Final = "response.content_part.done"
REASONING_DONE: Final = "response.reasoning_text.done"
ARGUMENTS_DONE: Final = "response.function_call_arguments.done"
# The kind of item that each delta extends.
DELTAS: Final = {
    "response.output_text.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}
_DELTA_OF: Final = {kind: delta for delta, kind in DELTAS.items()}
# The content of an empty item.
_EMPTY: Final[Mapping[str, Mapping[str, Any]]] = {
    "message": {"role": "assistant", "content": []},
    "reasoning": {"summary": [], "content": []},
    "function_call": {"arguments": ""},
}
# The first part of an item's content.
_FIRST_PART: Final[Mapping[str, Mapping[str, Any]]] = {
    "message": part_of({"type": "output_text", "text": ""}),
    "reasoning": {"type": "reasoning_text", "text": ""},
}


@dataclass(slots=True)
class Item:
    id: str
    index: int
    kind: str
    place: Mapping[str, Any]  # members that each event about its content repeats
    delta: str | None  # the type of the events that extend it, or None
    sent: list[str] = field(default_factory=list)  # its text or arguments so far
    is_done: bool = False

    def part(self, kind: str, part: Mapping[str, Any]) -> Event:
        place = {name: value for name, value in self.place.items() if name != "logprobs"}
        return {"type": kind, **place, "part": part}

    def remaining_events(self, text: str) -> Iterator[Event]:
        """Yield a delta with the end of the whole text that no earlier delta had."""
        sent = "".join(self.sent)
        if text.startswith(sent) and text != sent:
            self.sent = [text]
            yield {"type": self.delta, **self.place, "delta": text[len(sent) :]}

    def end(self, whole: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events that end its content, which the engine omits."""
        if self.kind == "reasoning":
            text = "".join(part.get("text", "") for part in whole.get("content") or ())
            yield from self.remaining_events(text)
            yield {"type": REASONING_DONE, **self.place, "text": text}
            yield self.part(PART_DONE, {"type": "reasoning_text", "text": text})
        elif self.kind == "function_call":
            yield from self.remaining_events(whole["arguments"])
            said = {"name": whole.get("name"), "arguments": whole["arguments"]}
            yield {"type": ARGUMENTS_DONE, **self.place, **said}


_BEGINNINGS: Final = frozenset({"response.created", "response.in_progress"})
# Events that are added when an item begins or ends; those of a node, which sends them, are dropped.
_OURS: Final = frozenset({PART_ADDED, PART_DONE, REASONING_DONE, ARGUMENTS_DONE})


class StreamEvents(EventTransform):
    """Completes one response.

    Args:
        base: The members of the response that repeat its request, including `model`.
        response_id: The id of the response if the engine omits its beginning.
        now: Unix time; `begin` sets it.
        on_complete: Called with the complete response before the client can refer to it.

    Attributes:
        is_over: Whether a stream's last event was sent.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        response_id: str,
        now: int = 0,
        on_complete: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.is_over = False
        self._on_complete = on_complete
        self._base = base
        self._id = response_id
        self._created_at = now
        self._has_begun = False
        self._items: list[Item] = []
        self._count = 0

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002 (of any status)
        self._created_at = int(datetime.now(tz=UTC).timestamp())

    def whole(self, status: int, body: bytes) -> bytes:
        given = orjson.loads(body) if status == HTTPStatus.OK else {}
        if "output" not in given:  # not a response
            return body
        response = complete_response(self._base, given)
        self._on_complete(response)
        return orjson.dumps(response)

    def event(self, event: bytes) -> bytes:
        try:
            given = members_of(event.partition(b"\n")[2] if event.startswith(b"event: ") else event)
        except InvalidEvent:
            return event
        if given is None:  # a comment
            return event
        last = self._items[-1] if self._items else None
        if last and given.get("item_id") == last.id and given["type"] == last.delta:
            last.sent.append(given["delta"])  # nearly always
            return self._encode_event({**last.place, **given})
        return b"".join(map(self._encode_event, self._events({**given})))

    def _encode_event(self, event: Event) -> bytes:
        self._count += 1
        return event_bytes(event, self._count - 1)

    def _events(self, event: Event) -> Iterator[Event]:
        kind = event.get("type", "")
        if item_kind := DELTAS.get(kind):
            yield from self._delta(item_kind, event)
        elif kind in _BEGINNINGS:
            yield from self._begin(event.get("response", {}).get("id"))
            if "prompt_progress" in event:  # the client asked for it
                response = new_response(self._base, self._id, self._created_at)
                yield {**event, "response": response}
        elif kind and "error" not in event and kind != "error":
            yield from self._begin(None)
            yield from self._other(kind, event)
        else:
            self.is_over = True
            yield error_as_event(event)

    def _begin(self, response_id: str | None) -> Iterator[Event]:
        if self._has_begun:
            return
        self._has_begun = True
        self._id = response_id or self._id
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": new_response(self._base, self._id, self._created_at)}

    def _delta(self, kind: str, event: Event) -> Iterator[Event]:
        item_id = event["item_id"]
        item = next((item for item in reversed(self._items) if item.id == item_id), None)
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
                yield from item.remaining_events(event["text"])
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
        """Begin an item, and yield the events with which it begins."""
        kind, index = given["type"], len(self._items)
        whole = {**_EMPTY.get(kind, {}), **item_of(given), "status": "in_progress"}
        place: dict[str, Any] = {"item_id": whole["id"], "output_index": index}
        if kind != "function_call":
            place["content_index"] = 0
        if kind == "message":
            place["logprobs"] = []
        item = Item(whole["id"], index, kind, place, _DELTA_OF.get(kind))
        self._items.append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": whole}
        if first := _FIRST_PART.get(kind):
            yield item.part(PART_ADDED, first)
        return item

    def _open(self, given: Mapping[str, Any]) -> Generator[Event, None, Item]:
        """Return the first open item with this id, or begin a new one."""
        for item in self._items:
            if item.id == given["id"] and not item.is_done:
                return item
        content = _EMPTY.get(given["type"], {})
        empty = {name: value for name, value in given.items() if name not in content}
        return (yield from self._add(empty))

    def _complete(self, event: Event) -> Event:
        given = event["response"]
        ended_at = given.get("completed_at") or given.get("created_at")
        own = {"id": self._id, "created_at": self._created_at, "completed_at": ended_at}
        response = complete_response(self._base, {**given, **own})
        self._on_complete(response)
        self.is_over = True
        return {**event, "type": f"response.{response['status']}", "response": response}


def completed_response(request: ProxyRequest, turn: StoredTurn | None) -> StreamEvents:
    """Return the transform that completes the response, and stores it on request."""
    base = {"model": request.json.get("model", request.model), **request_members(request.json)}
    if turn is not None:
        base["store"] = turn.is_stored
        base["previous_response_id"] = turn.previous_response_id
    store = turn.add if turn else lambda _: None
    return StreamEvents(base, f"resp_{uuid4().hex}", on_complete=store)
