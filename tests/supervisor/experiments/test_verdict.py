"""The verdict of the figures: a difference, or the requests that would show it."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from support.trial_requests import FIRST, RATE, finished, request

from supervisor.experiments.verdict import SideName, TrialFigures, verdict


def measured(
    base_rate: float, trial_rate: float, *, count: int = 30, noise: float = 0.1
) -> TrialFigures:
    """Return conversations of three requests with these rates, a third of them on trial."""
    chance, figures = random.Random(1), TrialFigures()  # noqa: S311 (values of a test)
    for number in range(1, count + 1):
        on_trial = number % 3 == 0
        rate = (trial_rate if on_trial else base_rate) * chance.lognormvariate(0, noise)
        for _ in range(3):
            fields = request(number, engine_decode_ms=40_000 / rate)
            figures.count_request("trial" if on_trial else "base", fields, 0)
    return figures


def test_a_difference_is_told_with_its_interval() -> None:
    found = verdict(measured(50.0, 100.0))[0][RATE]
    assert found.comparison.is_different
    assert "× faster (" in found.outcome
    assert found.medians["base"] is not None
    assert found.medians["trial"] is not None
    assert 45 < found.medians["base"] < 55
    assert 90 < found.medians["trial"] < 110


def test_without_a_difference_it_is_told_how_many_requests_are_missing() -> None:
    found = verdict(measured(50.0, 50.0))[0][RATE]
    before, _, told = found.outcome.removesuffix(" requests to go").partition(", about ")
    assert before == (
        f"no difference seen yet ({found.comparison.low:.2f}–{found.comparison.high:.2f} ×)"
    )
    assert found.to_go
    assert found.to_go <= int(told) < 1.1 * found.to_go
    loud = verdict(measured(50.0, 50.0, noise=3.0))[0][RATE]
    assert loud.outcome.endswith("more than 100000 requests to go")


def test_enough_requests_without_a_difference_are_told_as_that() -> None:
    found = verdict(measured(50.0, 50.0, count=300, noise=0.02))[0][RATE]
    assert found.to_go == 0
    assert found.outcome.startswith("no difference of 5 % or more (0.99–1.0")


def test_turns_of_few_conversations_prove_nothing() -> None:
    figures = TrialFigures()
    for number, rate in ((1, 50.0), (2, 100.0)):
        for _ in range(30):
            fields = request(number, engine_decode_ms=40_000 / rate)
            figures.count_request("trial" if number == 2 else "base", fields, 0)
    found = verdict(figures)[0][RATE]
    assert not found.comparison.is_different
    assert found.outcome == "too few conversations under equal load to compare"
    assert verdict(TrialFigures())[0][FIRST].medians["base"] is None


def under_load(speeds: Mapping[SideName, float], trial_others: tuple[int, ...]) -> TrialFigures:
    """Return requests that share the speed of their engine with the others on it."""
    chance, figures = random.Random(1), TrialFigures()  # noqa: S311 (values of a test)
    for number in range(1, 201):
        side: SideName = "trial" if number % 5 == 0 else "base"
        others = chance.choice(trial_others if side == "trial" else (0, 1, 2, 3))
        rate = speeds[side] / (1 + others) * chance.lognormvariate(0, 0.02)
        figures.count_request(side, request(number, engine_decode_ms=40_000 / rate), others)
    return figures


def test_a_busier_side_is_not_taken_for_a_slower_one() -> None:
    found = verdict(under_load({"base": 100.0, "trial": 100.0}, (0, 0, 0, 1)))[0][RATE]
    assert not found.comparison.is_different, found.outcome
    assert 60 < found.compared < 140
    assert found.comparison.ratio == pytest.approx(1, abs=0.1)


def test_a_difference_under_load_is_seen() -> None:
    found = verdict(under_load({"base": 100.0, "trial": 150.0}, (0, 1, 1, 2)))[0][RATE]
    assert found.comparison.is_different
    assert found.comparison.ratio == pytest.approx(1.5, abs=0.2)


def test_an_unequal_load_is_named() -> None:
    figures = finished(("base", request(1)), others=3)
    finished(("trial", request(2)), others=1, figures=figures)
    assert [note for note in verdict(figures)[1] if "3.0 others" in note and "1.0" in note]
    assert not verdict(finished(("base", request(1)), others=3))[1]


def test_conversations_that_changed_sides_are_counted() -> None:
    figures = finished(("trial", request(7)), ("base", request(7)))
    assert verdict(figures)[1] == [
        "1 conversation is left out from where a side was full or not ready",
    ]
