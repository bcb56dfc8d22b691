"""Events as the engine writes them become events as OpenAI's library reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError
from support.openai_events import check_stream, parsed
from support.response_streams import STREAMS, closed, opened, text_events, text_item, written

from proxy.forward.openai_responses import StreamEvents, request_members
from proxy.upstream.http1 import InvalidEvent

BASE = {"model": "chat", **request_members({"max_output_tokens": 50})}


def passed(*chunks: bytes) -> list[dict[str, Any]]:
    events = StreamEvents(BASE, "resp_0", 5)
    stream = b"".join([events.feed(chunk) for chunk in chunks])
    assert events.is_over
    return parsed(stream)


@pytest.mark.parametrize("name", STREAMS)
def test_every_event_is_one_of_openais(name: str) -> None:
    check_stream(passed(*STREAMS[name]))


@pytest.mark.parametrize("name", ["text", "calls", "thought"])
def test_the_engines_own_events_are_not(name: str) -> None:
    with pytest.raises(ValidationError):
        check_stream(parsed(b"".join(STREAMS[name])))


@pytest.mark.parametrize("name", STREAMS)
def test_what_has_all_of_it_stays_as_it_is(name: str) -> None:
    """A node that is a llama-corral sends such a stream."""
    first = passed(*STREAMS[name])
    assert passed(*[written(**event) for event in first]) == first


@pytest.mark.parametrize("name", STREAMS)
def test_pieces_of_any_size_give_the_same_events(name: str) -> None:
    stream = b"".join(STREAMS[name])
    pieces = [stream[at : at + 7] for at in range(0, len(stream), 7)]
    assert passed(*pieces) == passed(stream)


def test_a_response_of_as_many_tokens_as_it_may_have_was_cut() -> None:
    *_, last = passed(*opened(), *text_events("a"), closed(text_item("a"), tokens=50))
    assert last["type"] == "response.incomplete"
    assert last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_response_is_the_same_one_in_each_event() -> None:
    found = passed(*STREAMS["text"])
    responses = [event["response"] for event in found if "response" in event]
    assert [
        (response["id"], response["created_at"], response["model"]) for response in responses
    ] == [("resp_1", 5, "chat")] * 3
    assert responses[-1]["max_output_tokens"] == 50


def test_an_error_is_an_event_too() -> None:
    error = {"code": 500, "message": "Compute error.", "type": "server_error"}
    *_, last = passed(*opened(), f"data: {json.dumps({'error': error})}\n\n".encode())
    assert (last["type"], last["code"], last["message"]) == (
        "error",
        "server_error",
        "Compute error.",
    )


def test_comments_pass() -> None:
    events = StreamEvents(BASE, "resp_0", 5)
    assert events.feed(b":\n\ndata: [DONE]\n\n") == b":\n\ndata: [DONE]\n\n"
    assert not events.is_over


@pytest.mark.parametrize(
    "event",
    [
        written(type="response.output_item.added", item=3),
        written(type="response.output_text.delta", delta="a"),
        written(type="response.completed"),
        written(type="response.completed", response={"output": [1]}),
    ],
)
def test_an_event_of_another_shape_is_invalid(event: bytes) -> None:
    with pytest.raises(InvalidEvent):
        StreamEvents(BASE, "resp_0", 5).feed(event)


def test_progress_that_a_client_asked_for_passes() -> None:
    """llama-server's `return_progress`, which its own tests read."""
    progress = {"total": 9, "cache": 0, "processed": 4}
    told = written(type="response.in_progress", response={"id": "resp_1"}, prompt_progress=progress)
    found = passed(*opened(), told, *STREAMS["text"][2:])
    (event,) = [entry for entry in found if "prompt_progress" in entry]
    assert event["prompt_progress"] == progress
    assert event["response"] == found[0]["response"]
    check_stream(found)
