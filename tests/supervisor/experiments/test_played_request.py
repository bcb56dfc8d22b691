"""Which requests are sent, when, and with which body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings
from supervisor.experiments.capture_lines import (
    CapturedRequest,
    CapturedResponse,
    is_greedy,
    most_together,
    order_requests,
    played_body,
)
from supervisor.experiments.replay import Difference, SlotChoice, first_difference


def captured(
    number: int, at_ms: float, end_ms: float | None, body: Mapping[str, Any] | None = None
) -> CapturedRequest:
    timings = Timings(0, 4, 1.0, 7, 1.0)
    response = (
        None
        if end_ms is None
        else CapturedResponse(200, False, "", end_ms, None, 0.0, timings, None)  # noqa: FBT003
    )
    return CapturedRequest(number, at_ms, EndpointKind.CHAT, "/v1/chat", body or {}, response)


def test_a_request_waits_for_those_that_had_ended() -> None:
    given = [captured(2, 50, 90), captured(1, 0, 40), captured(3, 60, None), captured(4, 95, 99)]
    found = order_requests(given)
    assert [entry.number for entry in found] == [1, 2, 3, 4]
    assert [entry.after for entry in found] == [(), (0,), (), (1,)]
    assert most_together(found) == 2


@pytest.mark.parametrize(
    ("body", "expected"), [({"temperature": 0}, True), ({"top_k": 1}, True), ({}, False)]
)
def test_greedy_requests_are_known(body: dict[str, Any], *, expected: bool) -> None:
    assert is_greedy(body) is expected


def test_a_request_is_played_greedily_and_no_longer_than_it_was() -> None:
    body = played_body(captured(1, 0, 9, {"temperature": 0.7, "model": "old"}), "chat", 3)
    expected = {"temperature": 0, "seed": 1, "max_tokens": 7, "id_slot": 3, "stream": True}
    assert expected.items() <= body.items()
    assert body["model"] == "chat"
    assert "max_tokens" not in played_body(captured(1, 0, 9, {"n_predict": 2}), "chat", None)


def test_a_turn_takes_the_slot_of_its_conversation() -> None:
    def chat(*texts: str) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text} for text in texts]}

    slots = SlotChoice(2)
    first, second = chat("a long question " * 9), chat("something else " * 9)
    for body, slot in ((first, 0), (second, 1), (chat("a long question " * 9, "b"), 0)):
        assert slots.take(body) == slot
        slots.give_back(slot, body)
    assert slots.take(chat("quite another")) == 1


def test_the_first_token_that_differs_is_told() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == Difference(2, 2, "b", "c")
    assert first_difference(["a", "b"], ["a"]) == Difference(2, 2, "b", "(end)")
