"""A chat's stream becomes that of a message, as Anthropic's library reads it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from proxy.forward.anthropic import MessageEvents, events_of
from proxy.forward.assemblers import MessagesAssembler
from proxy.upstream.http1 import InvalidEvent

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def piece(delta: dict[str, Any], reason: str | None = None, **members: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return {"id": "chatcmpl-1", "model": "chat", "choices": [choice], **members}


def call(index: int, **function: str) -> dict[str, Any]:
    begun = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
    return {"tool_calls": [{"index": index, "function": function, **begun}]}


PIECES: dict[str, list[dict[str, Any]]] = {
    "text": [
        piece({"role": "assistant", "content": None}),
        piece({"content": '{"a"'}),
        piece({"content": ":1}"}),
        piece({}, "stop"),
        {"choices": [], "usage": USAGE},
    ],
    "thought": [
        piece({"reasoning_content": "hm"}),
        piece({"content": "{}"}),
        piece({}, "length", usage=USAGE),
    ],
    "calls": [
        piece(call(0, name="f", arguments="")),
        piece(call(0, arguments='{"a":')),
        piece(call(0, arguments="1}")),
        piece(call(1, name="g", arguments="{}")),
        piece({}, "tool_calls", usage=USAGE),
    ],
    "nothing": [piece({}, "stop", usage=USAGE)],
}
CONTENTS: dict[str, list[dict[str, Any]]] = {
    "text": [{"type": "text", "text": '{"a":1}'}],
    "thought": [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "{}"},
    ],
    "calls": [
        {"type": "tool_use", "id": "call-0", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call-1", "name": "g", "input": {}},
    ],
    "nothing": [],
}
REASONS = {"text": "end_turn", "thought": "max_tokens", "calls": "tool_use", "nothing": "end_turn"}


def stream_of(pieces: list[dict[str, Any]]) -> bytes:
    written = [b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces]
    return b"".join([*written, b"data: [DONE]\n\n"])


def events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for text in stream.decode().split("\n\n")[:-1]:
        name, data = text.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.mark.parametrize("name", PIECES)
def test_each_event_is_one_of_anthropics(name: str) -> None:
    translated = MessageEvents()
    found = events(translated.feed(stream_of(PIECES[name])))
    assembler = MessagesAssembler()
    for event in found:
        EVENT.validate_python(event)
        assembler.add(event)
    whole = assembler.assemble()
    assert translated.is_over
    assert (whole["content"], whole["stop_reason"]) == (CONTENTS[name], REASONS[name])
    assert whole["usage"] == {
        "cache_read_input_tokens": 4,
        "input_tokens": 5,
        "output_tokens": 3,
    }


def test_a_whole_completion_has_the_same_events() -> None:
    function = {"name": "f", "arguments": '{"a":1}'}
    message = {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "call-0", "type": "function", "function": function}],
    }
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    assembler = MessagesAssembler()
    for event in events_of({"id": "a", "model": "chat", "choices": [choice], "usage": USAGE}):
        assembler.add(event)
    assert [block["type"] for block in assembler.assemble()["content"]] == [
        "thinking",
        "text",
        "tool_use",
    ]


def test_an_error_is_an_event() -> None:
    translated = MessageEvents()
    error = b'data: {"error":{"code":500,"message":"no"}}\n\n'
    assert events(translated.feed(error)) == [
        {"type": "error", "error": {"type": "api_error", "message": "no"}}
    ]
    assert translated.is_over


def test_comments_pass() -> None:
    assert MessageEvents().feed(b":\n\n") == b":\n\n"


@pytest.mark.parametrize("event", [b"data: {}\n\n", b'data: {"choices":[1]}\n\n'])
def test_an_event_of_another_shape_is_invalid(event: bytes) -> None:
    with pytest.raises(InvalidEvent):
        MessageEvents().feed(event)
