from __future__ import annotations

import random

import pytest

from proxy.common.least_squares import LeastSquares


def test_it_finds_the_cost_of_each_part_of_a_sum() -> None:
    rng = random.Random(1)  # noqa: S311 (samples, no secret)
    found = LeastSquares((0.1, 1.0))
    for _ in range(40):
        tokens = rng.randint(20, 3000)
        found.add((1.0, tokens), 0.05 + 0.002 * tokens)
    assert found.coefficients == pytest.approx((0.05, 0.002), rel=0.1)


def test_it_follows_a_machine_that_became_slower() -> None:
    found = LeastSquares((1.0,))
    for cost in (1.0,) * 50 + (3.0,) * 60:
        found.add((100.0,), 100.0 * cost)
    assert found.coefficients[0] == pytest.approx(3.0, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    found = LeastSquares((0.1, 1.0))
    for tokens, seconds in ((10, 0.01), (100, 1.0), (1000, 30.0)):
        found.add((1.0, tokens), seconds)
    assert min(found.coefficients) >= 0
    assert found.value((1.0, 1000)) > 0


def test_equal_samples_are_met_and_none_say_nothing() -> None:
    found = LeastSquares((0.1, 1.0, 2000.0))
    assert found.coefficients == (0.0, 0.0, 0.0)
    for _ in range(5):
        found.add((1.0, 500.0, 125_000.0), 2.0)
    assert found.value((1.0, 500.0, 125_000.0)) == pytest.approx(2.0, rel=0.1)


def test_one_short_sample_does_not_make_long_prompts_endless() -> None:
    found = LeastSquares((0.125, 1.0, 2000.0))
    found.add((1.0, 36.0, 36.0 * 18), 0.36)
    assert found.value((1.0, 13_000.0, 13_000.0 * 6500)) == pytest.approx(130, rel=0.2)


def test_what_is_assumed_holds_where_samples_say_nothing_else() -> None:
    found = LeastSquares((1 / 32, 1.0), (0.0, 1.0))
    assert found.value((1.0, 500.0)) == 500
    found.add((1.0, 7.0), 36.0)
    assert found.value((1.0, 10_000.0)) == pytest.approx(10_000, rel=0.3)
    for tokens in (100, 1000, 3000) * 10:
        found.add((1.0, tokens), 20 + 0.6 * tokens)
    assert found.coefficients == pytest.approx((20.0, 0.6), rel=0.1)
