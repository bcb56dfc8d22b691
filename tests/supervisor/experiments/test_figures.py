"""Figures are kept by conversation and side, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
from support.trial_requests import FIRST, RATE, finished, request, values

from supervisor.experiments.verdict import TrialFigures


def test_values_are_grouped_by_conversation() -> None:
    requests = [request(1), request(1, first_token_ms=100.0), request(2, engine_decode_ms=800.0)]
    side = finished(*(("trial", request) for request in requests)).sides["trial"]
    assert values(side.values(RATE)) == [[100.0, 100.0], [50.0]]
    assert values(side.values(FIRST)) == [[0.5, 0.1], [0.5]]
    assert side.requests == 3


def test_a_request_without_a_conversation_is_a_separate_conversation() -> None:
    requests = [request(None, request=name) for name in ("req_1", "req_2")]
    assert (
        len(finished(*(("base", request) for request in requests)).sides["base"].values(RATE)) == 2
    )


@pytest.mark.parametrize(
    ("changes", "errors"),
    [({"status": 502}, 1), ({"status": 499}, 0), ({"status": 400}, 0)],
)
def test_only_whole_answers_have_values(changes: dict[str, Any], errors: int) -> None:
    side = finished(("base", request(**changes))).sides["base"]
    assert (
        side.requests,
        side.errors,
        side.values(RATE),
        side.values(FIRST),
    ) == (1, errors, [], [])


@pytest.mark.parametrize(
    "changes",
    [
        {"decoded_tokens": 3},
        {"decoded_tokens": None, "engine_decode_ms": None, "decode_ms": 0.0},
        {"engine_decode_ms": 0.0, "decode_ms": 0.0},
    ],
)
def test_an_answer_of_a_few_tokens_has_no_rate(changes: dict[str, Any]) -> None:
    side = finished(("base", request(**changes))).sides["base"]
    assert (side.values(RATE), values(side.values(FIRST))) == ([], [[0.5]])


def test_where_the_engine_reports_no_time_the_proxys_clock_counts() -> None:
    untimed = request(engine_decode_ms=None, decode_ms=800.0)
    assert values(finished(("base", untimed)).sides["base"].values(RATE)) == [[50.0]]


def test_a_conversation_counts_until_it_changes_sides() -> None:
    figures = finished(("trial", request(7)), ("base", request(7)), ("trial", request(7)))
    base, trial = figures.sides["base"], figures.sides["trial"]
    assert (base.values(RATE), values(trial.values(RATE))) == (
        [],
        [[100.0]],
    )
    assert (base.requests, trial.requests) == (1, 2)
    assert (base.excluded, trial.excluded) == (0, 1)


@pytest.mark.parametrize("is_fair", [True, False])
def test_a_conversation_that_was_diverted_has_no_values(*, is_fair: bool) -> None:
    figures = TrialFigures()
    figures.count_request("base", request(7, diverted=is_fair or None), 0, is_fair=is_fair)
    figures.count_request("base", request(7), 0)
    side = figures.sides["base"]
    assert (side.values(RATE), side.requests, side.excluded) == ([], 2, 1)


def test_the_latest_conversations_and_requests_are_kept() -> None:
    figures = TrialFigures()
    for number in range(1, 1101):
        finished(("base", request(number)), figures=figures)
    for _ in range(40):
        finished(("base", request(1100)), figures=figures)
    side = figures.sides["base"]
    assert (len(side.conversations), len(side.values(RATE)[-1]), side.requests) == (
        1000,
        32,
        1140,
    )
    assert "100" not in side.conversations
