"""Facts in a complete answer beyond its text, for each API."""

import json
import tracemalloc
from typing import Any

import orjson
import pytest

from proxy.forward.assemblers import ChatAssembler, CompletedResponse
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

SAID = {"cache_n": 3, "prompt_n": 4, "prompt_ms": 5, "predicted_n": 6, "predicted_ms": 7}
TIMINGS = Timings(3, 4, 5.0, 6, 7.0)
# Not every page tells how long anything took.
TOKENS = Timings(3, 4, 0.0, 6, 0.0)
USAGE = {"cache_read_input_tokens": 3, "input_tokens": 4, "output_tokens": 6}
SPENT = {"input_tokens": 7, "output_tokens": 6, "input_tokens_details": {"cached_tokens": 3}}
MESSAGE = {"role": "assistant", "content": "hi"}
TEXT = {"type": "text", "text": "hi"}
CALL = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}
ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
FUNCTION = {"type": "function_call", "name": "weather", "arguments": "{}"}


def part(**members: Any) -> list[dict[str, Any]]:
    return [{"index": 0, "finish_reason": None, **members}]


def delta(index: int = 0, **members: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": members}


def block(index: int = 0, **members: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": members}


STREAMS: dict[EndpointKind, tuple[list[dict[str, Any]], Timings, Any]] = {
    EndpointKind.CHAT: (
        [
            {"choices": part(delta={"role": "assistant", "content": None})},
            {"choices": part(delta={"content": "hi"})},
            {"choices": part(delta={}, finish_reason="stop"), "timings": SAID},
        ],
        TIMINGS,
        MESSAGE,
    ),
    EndpointKind.COMPLETION: (
        [
            {"choices": part(text="hi")},
            {"choices": part(text="", finish_reason="stop"), "timings": SAID},
        ],
        TIMINGS,
        None,
    ),
    EndpointKind.LLAMA_COMPLETION: (
        [{"content": "hi"}, {"stop": True, "timings": SAID}],
        TIMINGS,
        None,
    ),
    EndpointKind.MESSAGES: (
        [
            {"type": "message_start", "message": {"usage": {**USAGE, "output_tokens": 0}}},
            block(type="text", text=""),
            delta(type="text_delta", text="h"),
            delta(type="text_delta", text="i"),
            block(1, type="tool_use", id="a", name="weather", input={}),
            delta(1, type="input_json_delta", partial_json='{"city":'),
            delta(1, type="input_json_delta", partial_json=' "Rome"}'),
            {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 6}},
            {"type": "message_stop"},
        ],
        TOKENS,
        {"role": "assistant", "content": [TEXT, CALL]},
    ),
    EndpointKind.RESPONSES: (
        [
            {"type": "response.created", "response": {}},
            {
                "type": "response.completed",
                "response": {"output": [ITEM, FUNCTION], "usage": SPENT},
                "timings": SAID,
            },
        ],
        TIMINGS,
        {"role": "assistant", "content": [*ITEM["content"], FUNCTION]},
    ),
}
BODIES: dict[EndpointKind, tuple[dict[str, Any], Timings | None, Any]] = {
    EndpointKind.CHAT: ({"choices": part(message=MESSAGE), "timings": SAID}, TIMINGS, MESSAGE),
    EndpointKind.LLAMA_COMPLETION: ({"content": "hi", "timings": SAID}, TIMINGS, None),
    EndpointKind.MESSAGES: (
        {"content": [TEXT], "usage": USAGE},
        TOKENS,
        {"role": "assistant", "content": [TEXT]},
    ),
    EndpointKind.RESPONSES: (
        {"output": [ITEM], "usage": SPENT},
        TOKENS,
        {"role": "assistant", "content": ITEM["content"]},
    ),
}


def event(piece: object) -> bytes:
    return b"data: " + json.dumps(piece).encode() + b"\n\n"


@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_tells_its_cost_and_its_message(kind: EndpointKind) -> None:
    pieces, timings, response = STREAMS[kind]
    completed = CompletedResponse(kind, is_stream=True)
    for piece in pieces:
        completed.feed(event(piece))
    completed.feed(b"data: [DONE]\n\n")
    completion = completed.close(b"")
    assert (completion.timings, completion.reply) == (timings, response)


@pytest.mark.parametrize("kind", BODIES)
def test_a_whole_body_tells_the_same(kind: EndpointKind) -> None:
    body, timings, response = BODIES[kind]
    completed = CompletedResponse(kind, is_stream=False)
    completed.feed(json.dumps(body).encode())
    completion = completed.close(b"")
    assert (completion.timings, completion.reply) == (timings, response)


def test_a_tool_call_that_was_cut_off_has_no_input() -> None:
    completed = CompletedResponse(EndpointKind.MESSAGES, is_stream=True)
    completed.feed(event(block(type="tool_use", id="a", name="weather", input={})))
    completed.feed(event(delta(type="input_json_delta", partial_json='{"ci')))
    completion = completed.close(b"")
    assert completion.reply == {"role": "assistant", "content": [{**CALL, "input": {}}]}


def test_a_long_stream_is_read_in_batches() -> None:
    completed = CompletedResponse(EndpointKind.CHAT, is_stream=True)
    piece = event({"choices": part(delta={"content": "x" * 100})})
    for _ in range(1000):
        completed.feed(piece)
    completed.feed(event({"choices": part(delta={}, finish_reason="stop")}))
    completion = completed.close(b"")
    assert completion.reply == {"role": "assistant", "content": "x" * 100_000}


def engine_event(text: str, name: str = "content", created: int = 1, **members: Any) -> bytes:
    """An event as llama-server writes it."""
    choice = {"finish_reason": None, "index": 0, "delta": {name: text}}
    piece = {"choices": [choice], "created": created, "id": "a", "object": "chunk", **members}
    return b"data: " + orjson.dumps(piece) + b"\n\n"


def chat_message(*events: bytes) -> Any:
    """The lines of a stream after its first event."""
    completed = CompletedResponse(EndpointKind.CHAT, is_stream=True)
    first, *others = events
    completed.feed(b":" * 4096 + b"\n\n" + first)  # more than a batch
    for chunk in others:
        completed.feed(chunk)
    completed.feed(event({"choices": part(delta={}, finish_reason="stop")}))
    return completed.close(b"").reply


TEXTS = ("a", "", '"}}],"', "\\", "\n\n", "data: ", "é", "\U0001f600", "\x7f", "end")


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
def test_events_that_differ_in_their_text_are_read_together(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    add_text = ChatAssembler.add_text

    def add(assembler: ChatAssembler, name: str, text: str, tokens: int) -> None:
        added.append(text)
        add_text(assembler, name, text, tokens)

    monkeypatch.setattr(ChatAssembler, "add_text", add)
    long = "x" * 4096  # fills a batch
    message = chat_message(*[engine_event(text, name) for text in ("(", *TEXTS, long, ")")])
    text = "".join(["(", *TEXTS, long, ")"])
    assert message == {"role": "assistant", "content": "", name: text}
    assert added == ["".join([*TEXTS, long]), ")"]


@pytest.mark.parametrize(
    "other",
    [
        engine_event("b", created=2),
        engine_event("b", "reasoning_content"),
        engine_event("b", timings=SAID),
        b":\n\n" + engine_event("b"),
        engine_event("b")[:30],
        engine_event("b").replace(b'{"content":"b"}', b'{"content":"b","reasoning_content":"c"}'),
        event({"choices": part(delta={"content": "b"})}),
        event({"choices": [{**part(delta={"content": "b"})[0], "index": 1}]}),
    ],
)
def test_events_of_other_forms_are_read_one_by_one(other: bytes) -> None:
    rest = engine_event("b")[30:] if not other.endswith(b"\n\n") else b""
    chunks = [engine_event("a"), engine_event("x" * 4096), other, rest, engine_event("y" * 4096)]
    slow = chat_message(*[chunk.replace(b'"choices":', b'"choices": ') for chunk in chunks])
    assert chat_message(*chunks) == slow


@pytest.mark.parametrize(
    ("kind", "token"),
    [
        (
            EndpointKind.CHAT,
            {"choices": part(delta={"content": " word", "reasoning_content": " hm"})},
        ),
        (EndpointKind.MESSAGES, delta(type="text_delta", text=" word")),
    ],
)
def test_what_is_kept_of_a_stream_is_little_more_than_its_text(
    kind: EndpointKind, token: dict[str, Any]
) -> None:
    completed, piece = CompletedResponse(kind, is_stream=True), event(token)
    completed.feed(
        event(block(type="text", text="")) if kind is EndpointKind.MESSAGES else b":\n\n"
    )
    tracemalloc.start()
    try:
        for _ in range(5000):
            completed.feed(piece)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 3 * 5000 * len(" word hm")


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_client_response_that_is_too_long_has_no_completed(*, is_stream: bool) -> None:
    completed = CompletedResponse(EndpointKind.LLAMA_COMPLETION, is_stream=is_stream)
    completed.feed(event({"timings": SAID}))
    tracemalloc.start()
    try:
        for _ in range(4 * 1024):
            completed.feed(b":" + b"x" * 1021 + b"\n\n")
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    completion = completed.close(b"")
    assert (completion.timings, completion.reply) == (None, None)
    assert kept_bytes < 64 * 1024


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "garbage", [b"data: {\n\n", b"{", b"[]", event({"choices": 7}), event({"usage": 1})]
)
@pytest.mark.parametrize("kind", [EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES])
def test_what_is_not_understood_has_no_completed_and_does_no_harm(
    kind: EndpointKind, garbage: bytes, *, is_stream: bool
) -> None:
    completed = CompletedResponse(kind, is_stream=is_stream)
    completed.feed(garbage)
    completion = completed.close(b"")
    assert (completion.timings, completion.reply) == (None, None)


def test_an_client_response_without_an_end_has_no_message() -> None:
    completed = CompletedResponse(EndpointKind.CHAT, is_stream=True)
    completed.feed(event({"choices": part(delta={"content": "hi"})}))
    completion = completed.close(b"")
    assert completion.reply is None
