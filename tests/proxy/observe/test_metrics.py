"""Counters and histograms of requests."""

from typing import Any

import pytest

from proxy.observe.metrics import OTHER, Histogram, RequestCounters

FINISHED: Any = {
    "model": "chat",
    "instance": "chat.1",
    "status": 200,
    "attempts": 1,
    **dict.fromkeys(("queued_ms", "evict_ms", "load_ms"), 0.0),
    "first_token_ms": 120.0,
    "duration_ms": 620.0,
    "expected_cached_tokens": 30,
    "cached_tokens": 28,
    "prompt_tokens": 12,
    "decoded_tokens": 11,
    "engine_decode_ms": 500.0,
    "drafted_tokens": 8,
    "accepted_tokens": 6,
}
LABELS = ("chat", "chat.1")


def after(*events: Any) -> RequestCounters:
    counters = RequestCounters()
    for name, changes in events:
        counters.report(name, {**FINISHED, **changes})
    return counters


@pytest.mark.parametrize(
    ("status", "counter"),
    [
        (200, "requests_finished"),
        (400, "requests_finished"),
        (499, "requests_cancelled"),
        (502, "requests_failed"),
        (500, "requests_failed"),
    ],
)
def test_an_end_is_counted_once_by_its_status(status: int, counter: str) -> None:
    counters = after(("request.finished", {"status": status}))
    ends = ("requests_finished", "requests_cancelled", "requests_failed")
    assert {name: counters.counts[name][LABELS] for name in ends} == {
        name: int(name == counter) for name in ends
    }


def test_a_rejection_is_counted_by_its_code() -> None:
    counters = after(
        ("request.rejected", {"model": "chat", "code": "queue_full"}),
        ("request.rejected", {"model": None, "code": "forbidden"}),
    )
    assert counters.counts["requests_rejected"] == {("chat", "queue_full"): 1, ("", "forbidden"): 1}


def test_tokens_are_summed() -> None:
    counters = after(("request.finished", {}), ("request.finished", {"cached_tokens": 2}))
    names = ("prompt_tokens", "cached_tokens", "expected_cached_tokens", "decoded_tokens")
    assert [counters.counts[name][LABELS] for name in names] == [24, 30, 60, 22]
    assert counters.counts["drafted_tokens"][LABELS] == 16
    assert counters.counts["accepted_tokens"][LABELS] == 12


def test_what_is_found_of_the_expected_tokens_is_never_more_than_these() -> None:
    counters = after(
        ("request.finished", {"expected_cached_tokens": 30, "cached_tokens": 800}),
        ("request.finished", {"expected_cached_tokens": 100, "cached_tokens": 40}),
        ("request.finished", {"expected_cached_tokens": 0, "cached_tokens": 500}),
        ("request.finished", {"expected_cached_tokens": None, "cached_tokens": None}),
    )
    assert counters.counts["expected_cached_tokens"][LABELS] == 130
    assert counters.counts["expected_tokens_found"][LABELS] == 70


def test_a_pause_is_counted_with_its_time() -> None:
    paused = {"yields": 2, "paused_ms": 900.0}
    counters = after(("request.finished", {}), ("request.finished", paused))
    assert counters.counts["yields"][LABELS] == 2
    assert counters.histograms["paused_seconds"][LABELS].total == pytest.approx(0.9)
    assert sum(counters.histograms["paused_seconds"][LABELS].counts) == 1


def test_times_are_in_seconds_and_the_time_per_token_is_a_mean() -> None:
    histograms = after(("request.finished", {})).histograms
    totals = {name: found[LABELS].total for name, found in histograms.items() if LABELS in found}
    assert totals == pytest.approx(
        {
            "queue_seconds": 0.0,
            "time_to_first_token_seconds": 0.12,
            "time_per_output_token_seconds": 0.05,
            "request_seconds": 0.62,
        }
    )


def test_missing_fields_are_not_counted() -> None:
    missing = dict.fromkeys(
        ("first_token_ms", "cached_tokens", "prompt_tokens", "decoded_tokens", "engine_decode_ms")
    )
    counters = after(("request.finished", {**missing, "decode_ms": 0.0}))
    assert not counters.counts["prompt_tokens"]
    assert not counters.histograms["time_to_first_token_seconds"]
    assert not counters.histograms["time_per_output_token_seconds"]


def test_retries_and_upstream_failures_are_counted() -> None:
    counters = after(
        ("upstream.failed", {}),
        ("request.finished", {"attempts": 2, "instance": "chat.2"}),
    )
    assert counters.counts["upstream_failures"] == {LABELS: 1}
    assert counters.counts["retries"] == {("chat", "chat.2"): 1}


def test_other_events_are_ignored() -> None:
    counters = after(("instance.state_changed", {}))
    assert not any(counters.counts.values())


def test_names_beyond_a_limit_are_counted_together() -> None:
    counters = RequestCounters()
    for number in range(300):
        name = f"m{number}"
        counters.report("request.finished", {**FINISHED, "model": name, "instance": f"{name}.1"})
    counts = counters.counts["requests_finished"]
    assert counts.total() == 300
    assert len({model for model, _ in counts}) == 65
    assert len({instance for _, instance in counts}) == 257
    assert counts[OTHER, OTHER] == 44


def test_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0)
