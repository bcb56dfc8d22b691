"""The part of a stream before the first token."""

import json
from typing import Any

import pytest

from proxy.forward.prefill import PrefillFilter, progress_of
from proxy.upstream.http1 import InvalidEvent

SAID = {"total": 100, "cache": 10, "processed": 40, "time_ms": 1}
PROGRESS = b'data: {"prompt_progress":{"total":100,"cache":10,"processed":40,"time_ms":1}}\n\n'
TOKEN = b'data: {"content":"hi"}\n\n'


def prefill_filter(*, hides_progress: bool = True) -> PrefillFilter:
    return PrefillFilter(hides_progress=hides_progress)


def piece(delta: dict[str, Any], **members: Any) -> bytes:
    choice = {"finish_reason": None, "index": 0, "delta": delta}
    data = json.dumps({"choices": [choice], **members}, separators=(",", ":"))
    return f"data: {data}\n\n".encode()


ROLE = piece({"role": "assistant", "content": None})


def test_progress_is_read_and_taken_out() -> None:
    start = prefill_filter()
    assert start.feed(PROGRESS) == b""
    assert start.latest == (40, 100, 10)
    assert not start.is_over


def test_from_the_first_token_on_everything_passes_half_events_too() -> None:
    start = prefill_filter()
    assert start.feed(PROGRESS + TOKEN + PROGRESS + b"data: ha") == TOKEN + PROGRESS + b"data: ha"
    assert start.is_over


def test_wherever_it_is_cut_the_same_passes() -> None:
    stream = PROGRESS + TOKEN
    for cut in range(1, len(stream)):
        start = prefill_filter()
        assert start.feed(stream[:cut]) + start.feed(stream[cut:]) == TOKEN, cut


def test_who_asked_for_progress_gets_it() -> None:
    start = prefill_filter(hides_progress=False)
    assert start.feed(PROGRESS) == PROGRESS
    assert start.latest == (40, 100, 10)


def test_the_engines_comments_end_here() -> None:
    start = prefill_filter()
    assert start.feed(b":\n\n") == b""
    assert not start.is_over


@pytest.mark.parametrize("first", [b"data: null\n\n", b"data: [DONE]\n\n"])
def test_whatever_else_comes_first_is_the_beginning(first: bytes) -> None:
    start = prefill_filter()
    assert start.feed(first) == first
    assert start.is_over


def test_a_text_that_speaks_of_progress_is_a_token() -> None:
    token = b"data: " + json.dumps({"content": '"prompt_progress":{}'}).encode() + b"\n\n"
    assert prefill_filter().feed(token) == token


BEGUN = ROLE + piece({"reasoning_content": "Okay, "}, prompt_progress=SAID)
LATER = piece({"role": "assistant", "content": None}, prompt_progress=SAID)


def test_the_role_is_said_once_however_often_progress_came() -> None:
    token = piece({"content": "hi"})
    assert prefill_filter().feed(LATER + LATER + ROLE + token) == ROLE + token


def test_what_the_template_began_comes_with_the_first_token() -> None:
    stream = BEGUN + LATER + ROLE + piece({"reasoning_content": "so"}) + TOKEN
    start = prefill_filter()
    assert start.feed(stream) == ROLE + piece({"reasoning_content": "Okay, so"}) + TOKEN
    assert start.latest == (40, 100, 10)


def test_what_the_template_began_comes_before_a_first_token_of_another_kind() -> None:
    begun = piece({"reasoning_content": "Okay, "})
    for token in (piece({"content": "hi"}), piece({}), piece({"tool_calls": []})):
        assert prefill_filter().feed(BEGUN + LATER + ROLE + token) == ROLE + begun + token


def test_who_asked_for_progress_gets_the_engines_own_stream() -> None:
    stream = BEGUN + LATER + ROLE + TOKEN
    assert prefill_filter(hides_progress=False).feed(stream) == stream


def test_what_is_not_json_is_garbled() -> None:
    with pytest.raises(InvalidEvent):
        prefill_filter().feed(b"data: <html>\n\n")


@pytest.mark.parametrize("said", [None, 7, [], "x"])
def test_what_is_no_progress_is_none(said: object) -> None:
    assert progress_of({"prompt_progress": said}) is None


def test_figures_that_are_missing_count_as_nothing() -> None:
    assert progress_of({"prompt_progress": {"total": "x"}}) == (0, 0, 0)
