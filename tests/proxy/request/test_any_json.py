"""Any bytes of a client or an instance are an answer, a mistake or an invalid event."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import orjson
from support.requests import ask

from proxy.errors import BadRequest
from proxy.forward.anthropic import MessageEvents, as_chat
from proxy.forward.openai_responses import StreamEvents, request_members
from proxy.request.engine_members import engine_members
from proxy.request.stored_responses import ResponseStore, StoredTurn
from proxy.settings import StoredResponseSettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent

TRIES = 1000
ATOMS = ("", "a", "msg_1", "assistant", "user", 0, 1, -1, 1.5, True, None)
BLOCKS = (
    *("text", "thinking", "image", "tool_use", "tool_result", "message", "function_call"),
    *("item_reference", "reasoning", "base64", "url", "json_schema", "enabled", "output_text"),
)
MEMBERS = (
    *("text", "thinking", "name", "id", "input", "tool_use_id", "source", "content", "output"),
    *("summary", "call_id", "arguments", "role", "format", "budget_tokens", "url", "data"),
)
REQUEST = ("messages", "input", "system", "thinking", "text", "tool_choice", "tools", "metadata")
EVENTS = (
    *("response.created", "response.output_item.added", "response.output_item.done"),
    *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
    *("response.function_call_arguments.delta", "response.completed", "error", "other"),
)
EVENT = ("item", "item_id", "delta", "part", "response", "text", "error", "choices", "usage")


class AnyJson:
    """Random values in the form that the code reads."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)  # noqa: S311 (the same each time)

    def value(self, depth: int = 3) -> Any:
        form = self._random.random()
        if depth == 0 or form < 0.35:
            return self._random.choice(ATOMS)
        if form < 0.55:
            return [self.value(depth - 1) for _ in range(self._random.randrange(3))]
        return self.object(BLOCKS, MEMBERS, depth - 1)

    def object(self, kinds: Sequence[str], names: Sequence[str], depth: int = 3) -> dict[str, Any]:
        chosen = self._random.sample(names, self._random.randrange(5))
        kind = self._random.choice(kinds) if self._random.random() < 0.9 else self.value(1)
        return {"type": kind, **{name: self.value(depth) for name in chosen}}

    def message(self) -> Any:
        role = self._random.choice(("user", "assistant", 1))
        return {"role": role, "content": [self.value() for _ in range(3)]}


def test_requests_of_the_responses_api() -> None:
    store = ResponseStore(StoredResponseSettings(enabled=True))
    for seed in range(TRIES):
        members = AnyJson(seed).object(BLOCKS, REQUEST)
        turn = StoredTurn(store, "me", 1000)
        with suppress(BadRequest):
            orjson.dumps(request_members(engine_members(turn.members(members))))
            turn.add({"id": "resp_1", "output": []})


def test_requests_for_messages() -> None:
    asked = replace(ask("a"), kind=EndpointKind.MESSAGES)
    schema = {"type": "json_schema", "schema": {}}
    for seed in range(TRIES):
        some = AnyJson(seed)
        members = some.object(BLOCKS, REQUEST)
        members |= {"messages": [some.message(), some.value()], "output_format": schema}
        with suppress(BadRequest):
            assert as_chat(replace(asked, json=members))


def test_streams() -> None:
    for seed in range(TRIES):
        some = AnyJson(seed)
        events = [orjson.dumps(some.object(EVENTS, EVENT)) for _ in range(3)]
        for translated in (StreamEvents({}, "resp_1", 0), MessageEvents()):
            with suppress(InvalidEvent):
                translated.feed(b"".join(b"data: %b\n\n" % event for event in events))
