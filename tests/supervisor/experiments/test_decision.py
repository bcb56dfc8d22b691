"""The fate of a canary: by crashes, errors, speed, and the number of observations."""

from __future__ import annotations

import random
import re

import pytest
from support.trial_requests import request

from supervisor.experiments.verdict import TrialFigures, decide, least_increase

MARGIN = 0.1
TRIED = 10_000  # its conversations are others


def observed(slower: float = 1.0, later: float = 1.0, seconds: int = 60) -> TrialFigures:
    """Return figures of two requests per second and side, with noise of 10 %."""
    rng = random.Random(7)  # noqa: S311 (test data)
    figures = TrialFigures()
    for number in range(2 * seconds):
        noise, other = (rng.lognormvariate(0, 0.1) for _ in range(2))
        own = request(number, engine_decode_ms=400.0 * noise, first_token_ms=500.0 * noise)
        times = {
            "engine_decode_ms": 400.0 * other * slower,
            "first_token_ms": 500.0 * other * later,
        }
        figures.count_request("base", own, 1, number / 2)
        figures.count_request("trial", request(TRIED + number, **times), 1, number / 2)
    return figures


def test_one_as_good_is_promoted_when_its_time_is_over() -> None:
    figures = observed()
    assert decide(figures, MARGIN, is_over=False)[0] == "wait"
    done = decide(figures, MARGIN, is_over=True)
    assert done[0] == "promote"
    assert done[1].startswith("tokens/s no difference seen (")


@pytest.mark.parametrize(("slower", "later"), [(2.0, 1.0), (1.0, 2.0)])
def test_a_slow_one_is_withdrawn_before_its_time_is_over(slower: float, later: float) -> None:
    done = decide(observed(slower, later), MARGIN, is_over=False)
    assert done[0] == "withdraw"
    assert re.search(r"(2\.\d|1\.9\d) × (slower|longer)", done[1])


def test_one_slower_by_less_than_the_margin_is_promoted_and_the_figures_say_so() -> None:
    figures = observed(slower=1.1, seconds=200)
    done = decide(figures, 0.2, is_over=True)
    assert done[0] == "promote"
    assert "slower" in done[1]
    assert decide(figures, 0.05, is_over=True)[0] == "withdraw"


def test_a_first_token_that_comes_unnoticeably_later_does_not_matter() -> None:
    figures = TrialFigures()
    for number in range(120):
        figures.count_request("base", request(number, first_token_ms=10.0), 1, number / 2)
        figures.count_request("trial", request(TRIED + number, first_token_ms=30.0), 1, number / 2)
    assert decide(figures, MARGIN, is_over=True)[0] == "promote"


def test_too_little_is_known_of_one_without_requests() -> None:
    done = decide(TrialFigures(), MARGIN, is_over=True)
    assert done[0] == "withdraw"
    assert "too few requests" in done[1]


def test_a_crash_is_enough() -> None:
    figures = observed()
    figures.sides["base"].crashes += 1
    assert decide(figures, MARGIN, is_over=False)[0] == "wait"
    figures.sides["trial"].crashes += 1
    assert decide(figures, MARGIN, is_over=False)[1] == "its engine crashed"


def test_more_errors_withdraw_it() -> None:
    figures = observed()
    for _ in range(12):
        figures.count_request("trial", request(TRIED - 1, status=500), 0)
    done = decide(figures, MARGIN, is_over=False)
    assert done[0] == "withdraw"
    assert done[1] == "it has more errors: 12 of 132 requests against 0 of 120 requests"
    for _ in range(12):
        figures.count_request("base", request(TRIED - 2, status=500), 0)
    assert decide(figures, MARGIN, is_over=False)[0] == "wait"


def test_intervals_of_error_rates_are_those_of_the_source() -> None:
    # Newcombe 1998, table II, case (a): 56 of 70 and 48 of 80, at 95 %: 0.0524 to 0.3339.
    assert least_increase((48, 80), (56, 70)) < 0.0524
    assert least_increase((0, 100), (5, 10)) > 0
    assert least_increase((0, 5), (1, 1)) < 0
    assert least_increase((0, 0), (1, 1)) == least_increase((1, 1), (0, 0)) == -1
