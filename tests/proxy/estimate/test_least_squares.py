from __future__ import annotations

import random

import pytest

from proxy.estimate.least_squares import LeastSquares


def test_it_finds_what_each_part_of_a_sum_costs() -> None:
    rng = random.Random(1)  # noqa: S311 (samples, no secret)
    found = LeastSquares(2, leading=1)
    for _ in range(40):
        tokens = rng.randint(20, 3000)
        found.add((1.0, tokens), 0.05 + 0.002 * tokens)
    assert found.coefficients == pytest.approx((0.05, 0.002), rel=0.05)


def test_it_follows_a_machine_that_became_slower() -> None:
    found = LeastSquares(1, leading=0)
    for cost in (1.0,) * 50 + (3.0,) * 60:
        found.add((100.0,), 100.0 * cost)
    assert found.coefficients[0] == pytest.approx(3.0, rel=0.2)


def test_no_coefficient_is_negative() -> None:
    found = LeastSquares(2, leading=1)
    for tokens, seconds in ((10, 0.01), (100, 1.0), (1000, 30.0)):
        found.add((1.0, tokens), seconds)
    assert min(found.coefficients) >= 0
    assert found.value((1.0, 1000)) > 0


def test_equal_samples_are_met_and_none_say_nothing() -> None:
    found = LeastSquares(3, leading=1)
    assert found.coefficients == (0.0, 0.0, 0.0)
    for _ in range(5):
        found.add((1.0, 500.0, 125_000.0), 2.0)
    assert found.value((1.0, 500.0, 125_000.0)) == pytest.approx(2.0, rel=0.05)
