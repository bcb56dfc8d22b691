"""What is recorded of requests that ended."""

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest

from supervisor.records.request_sizes import Observer, RecordedRequest

START = datetime(2026, 1, 1, tzinfo=UTC)


def finished(**changed: Any) -> dict[str, Any]:
    fields = {
        "model": "chat",
        "kind": "chat",
        "conversation": 1,
        "status": 200,
        "duration_ms": 500,
        "prompt_tokens": 10,
        "cached_tokens": 30,
        "decoded_tokens": 7,
    }
    return fields | changed


def observe(observer: Observer, at_s: float, **changed: Any) -> RecordedRequest:
    found = observer.observe(START + timedelta(seconds=at_s), finished(**changed))
    assert found
    return found


def test_sizes_are_those_of_the_whole_prompt_and_the_answer() -> None:
    found = observe(Observer(), 1)
    assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == (40, 30, 7)
    assert (found.kind, found.duration_s) == ("chat", 0.5)


def test_an_embedding_is_not_recorded_because_it_cannot_be_replayed() -> None:
    fields = finished(kind="embed_or_rerank", decoded_tokens=0)
    assert Observer().observe(START, fields) is None


def test_pauses_are_from_beginning_to_beginning_and_from_end_to_beginning() -> None:
    observer = Observer()
    pauses = [
        (found.after_any_s, found.after_own_s)
        for found in (
            observe(observer, 1, conversation=1),
            observe(observer, 2, conversation=2),
            observe(observer, 4, conversation=1, duration_ms=2500),  # began before the one above
            observe(observer, 9, conversation=1),
        )
    ]
    assert pauses == [(None, None), (1.0, None), (0.0, 0.5), (7.0, 4.5)]


def test_pauses_are_those_within_a_model() -> None:
    observer = Observer()
    observe(observer, 1)
    assert observe(observer, 2, model="other").after_any_s is None
    assert observe(observer, 5).after_any_s == 4


def test_a_conversation_has_one_number_that_says_nothing() -> None:
    observer = Observer(count(700).__next__)
    numbers = [
        observe(observer, 1, **changed).conversation
        for changed in (
            {"conversation": 1},
            {"conversation": 2},
            {"conversation": 1},
            {"conversation": 1, "model": "other"},
            {"conversation": None},
        )
    ]
    assert numbers == [700, 701, 700, 702, None]
    assert observe(Observer(), 1).conversation != observe(Observer(), 1).conversation


@pytest.mark.parametrize("changed", [{"status": 499}, {"status": 502}, {"prompt_tokens": None}])
def test_a_request_without_an_answer_or_tokens_is_not_recorded(changed: dict[str, Any]) -> None:
    assert Observer().observe(START, finished(**changed)) is None


def test_conversations_are_bounded() -> None:
    observer = Observer(count(1).__next__)
    for number in range(4097):
        observe(observer, number, conversation=number)
    assert observe(observer, 5000, conversation=4096).conversation == 4097
    assert observe(observer, 5000, conversation=0).conversation == 4098
