"""Sides are compared moment by moment: a slowdown of both for a while changes nothing."""

from __future__ import annotations

import math
import random

from supervisor.bench.figures import RATE
from supervisor.experiments.verdict import Timed, compare_over_time


def side(factor: float, seed: int, seconds: int = 100) -> list[Timed]:
    """Return two rates a second; the machine has half its speed for a third of the time."""
    rng = random.Random(seed)  # noqa: S311 (test data)
    return [
        (at / 2, factor * (50 if at // 40 % 3 else 100) * rng.lognormvariate(0, 0.05), at % 3)
        for at in range(2 * seconds)
    ]


def test_a_machine_that_gets_slower_for_both_makes_no_difference() -> None:
    found = compare_over_time(side(1, 1), side(1, 2), words=RATE)
    assert not found.is_different
    assert 0.95 < found.low < 1 < found.high < 1.05


def test_a_side_that_is_slower_all_the_time_is_found() -> None:
    found = compare_over_time(side(1, 1), side(0.8, 2), words=RATE)
    assert found.is_different
    assert 1.2 < 1 / found.ratio < 1.3


def test_a_side_that_was_slow_once_widens_the_interval() -> None:
    slow_once = [(at, rate / (4 if at < 20 else 1), others) for at, rate, others in side(1, 2)]
    found = compare_over_time(side(1, 1), slow_once, words=RATE)
    assert not found.is_different
    assert found.low < 0.8


def test_a_request_that_waited_once_for_the_processor_says_nothing() -> None:
    values = [(at, rate / (50 if at % 10 == 0 else 1), others) for at, rate, others in side(1, 2)]
    found = compare_over_time(side(1, 1), values, words=RATE)
    assert not found.is_different
    assert found.low > 0.9


def test_few_moments_have_no_interval() -> None:
    for seconds in (0, 4, 19):
        found = compare_over_time(side(1, 1, seconds), side(0.1, 2, seconds), words=RATE)
        assert not found.is_different
        assert math.isinf(found.high)
    apart = [(at + 500, rate, others) for at, rate, others in side(1, 2)]
    assert math.isinf(compare_over_time(side(1, 1), apart, words=RATE).high)
