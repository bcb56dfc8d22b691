"""Streams of engines as lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.apis.ollama_translation import AnswerLines, as_message, as_response
from proxy.upstream.http1 import InvalidEvent

TIMINGS = {"cache_n": 5, "prompt_n": 3, "prompt_ms": 2.5, "predicted_n": 2, "predicted_ms": 8}
DONE = b"data: [DONE]\n\n"
FIGURES = {
    "total_duration": 9,
    "prompt_eval_count": 8,
    "prompt_eval_duration": 2_500_000,
    "eval_count": 2,
    "eval_duration": 8_000_000,
}


class Lines(AnswerLines):
    def durations(self) -> dict[str, int]:
        return {"total_duration": 9}


def event(**members: Any) -> bytes:
    return f"data: {json.dumps(members)}\n\n".encode()


def chat(delta: dict[str, Any], finish_reason: str | None = None, **members: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event(choices=[choice], **members)


def lines_of(*chunks: bytes, shape: Any = as_message) -> list[dict[str, Any]]:
    lines = Lines(shape)
    lines.take("chat:latest", None)
    found = [json.loads(line) for chunk in chunks for line in lines.feed(chunk).splitlines()]
    assert lines.is_over
    for entry in found:
        assert entry.pop("created_at").endswith("Z")
        assert entry.pop("model") == "chat:latest"
    return found


def said(content: str, **members: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content, **members}, "done": False}


def test_each_piece_of_text_is_a_line_and_the_end_has_the_figures() -> None:
    start = chat({"role": "assistant", "content": None})
    first, second = chat({"reasoning_content": "hm"}), chat({"content": "b"})
    end = chat({}, "stop", timings=TIMINGS)
    assert lines_of(b":\n\n", start, first + second, end, DONE) == [
        said("", thinking="hm"),
        said("b"),
        {**said(""), "done": True, "done_reason": "stop", **FIGURES},
    ]


def test_a_call_is_told_once_it_is_complete() -> None:
    def piece(index: int, **function: str) -> bytes:
        return chat({"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]})

    pieces = [
        piece(0, name="f", arguments='{"a"'),
        piece(0, arguments=": 1}"),
        piece(1, name="g", arguments='{"cut'),
    ]
    called, last = lines_of(*pieces, chat({}, "tool_calls"), DONE)
    assert [tool_call["function"] for tool_call in called["message"]["tool_calls"]] == [
        {"index": 0, "name": "f", "arguments": {"a": 1}},
        {"index": 1, "name": "g", "arguments": {}},
    ]
    assert (last["done"], last["done_reason"]) == (True, "stop")


def test_a_completion_is_a_response() -> None:
    pieces = [
        event(content="b", stop=False),
        event(
            content="",
            stop=True,
            stop_type="limit",
            tokens_evaluated=8,
            tokens_predicted=2,
            timings=TIMINGS,
        ),
    ]
    assert lines_of(*pieces, shape=as_response) == [
        {"response": "b", "done": False},
        {"response": "", "done": True, "done_reason": "length", **FIGURES},
    ]


def test_a_whole_answer_is_one_line() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"content": "b", "reasoning_content": "hm", "tool_calls": [call]}
    usage = {"prompt_tokens": 8, "completion_tokens": 2}
    body = {"choices": [{"message": message, "finish_reason": "length"}], "usage": usage}
    lines = Lines(as_response)
    answer = json.loads(lines.translate_whole(body))
    assert (answer["response"], answer["thinking"]) == ("b", "hm")
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert (answer["done"], answer["done_reason"], answer["eval_count"]) == (True, "length", 2)


def test_probabilities_pass() -> None:
    probability = {"token": "b", "logprob": -0.5, "top_logprobs": []}
    choice = {"delta": {"content": "b"}, "logprobs": {"content": [probability]}}
    assert lines_of(event(choices=[choice]), DONE)[0]["logprobs"] == [probability]


def test_an_error_is_the_last_line() -> None:
    lines = Lines(as_message)
    assert lines.feed(event(error={"code": 500, "message": "x"}) + DONE) == b'{"error":"x"}\n'
    assert lines.is_over


def test_another_format_is_an_error_of_the_engine() -> None:
    lines = Lines(as_message)
    with pytest.raises(InvalidEvent):
        lines.feed(event(choices=[3]))
