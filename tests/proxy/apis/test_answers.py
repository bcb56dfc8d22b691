"""llama-server's answers in the format of the plain endpoints."""

from __future__ import annotations

import json

import pytest

from proxy.apis.batch_completions import generated_completion
from proxy.apis.generate import TokenEvents, token_list
from proxy.upstream.http1 import InvalidEvent

WHOLE = {"content": "bc", "tokens": [7, 8], "stop": True, "tokens_predicted": 2}
RESULT = {"token_ids": [7, 8], "text": "bc", "num_generated": 2}


def piece(tokens: list[int], content: str, **members: object) -> bytes:
    written = json.dumps({"tokens": tokens, "content": content, **members})
    return f"data: {written}\n\n".encode()


def fed(*chunks: bytes) -> str:
    events = TokenEvents()
    return b"".join(events.feed(chunk) for chunk in chunks).decode()


def test_a_completion_has_its_tokens_and_their_number() -> None:
    """Seed 003: GenerateResponse token_ids, text, num_generated."""
    assert generated_completion(WHOLE) == RESULT


def test_a_text_has_its_tokens_and_their_number() -> None:
    """Seed 003: TokenizeResponse."""
    assert token_list({"tokens": [1, 2, 3]}) == {"token_ids": [1, 2, 3], "num_tokens": 3}


def test_each_token_is_an_event_and_the_end_is_one() -> None:
    """Seed 003: StreamTokenEvent and StreamDoneEvent."""
    end = piece([], "", stop=True, tokens_predicted=2)
    assert fed(piece([7], "b", stop=False), piece([8], "c", stop=False) + end) == (
        'event: token\ndata: {"token_id":7,"text":"b"}\n\n'
        'event: token\ndata: {"token_id":8,"text":"c"}\n\n'
        'event: done\ndata: {"num_generated":2}\n\n'
    )


def test_events_may_arrive_in_pieces() -> None:
    event = piece([7], "b", stop=False)
    assert fed(*[event[at : at + 1] for at in range(len(event))]) == fed(event) != ""


def test_the_text_belongs_to_the_last_of_several_tokens() -> None:
    assert fed(piece([7, 8], "b", stop=False)) == (
        'event: token\ndata: {"token_id":7,"text":""}\n\n'
        'event: token\ndata: {"token_id":8,"text":"b"}\n\n'
    )


def test_progress_comments_and_other_data_are_left_out() -> None:
    progress = piece([], "", stop=False, prompt_progress={"total": 5})
    assert fed(b":\n\n", progress, b"data: null\n\n", b"data: [DONE]\n\n") == ""


def test_an_error_is_a_separate_event() -> None:
    assert fed(b'data: {"error":{"code":500,"message":"x"}}\n\n') == (
        'event: error\ndata: {"error":{"code":500,"message":"x"}}\n\n'
    )


def test_a_broken_event_is_not_passed() -> None:
    with pytest.raises(InvalidEvent):
        fed(b"data: {\n\n")
