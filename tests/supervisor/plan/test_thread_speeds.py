"""Which thread counts are measured, and which one is taken."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from supervisor.plan.auto import (
    ThreadSpeeds,
    fastest_count,
    known_speeds,
    next_untried,
    thread_counts,
)


@pytest.mark.parametrize(
    ("cores", "expected"), [(1, (1,)), (2, (2, 1)), (3, (3, 2, 1)), (16, (16, 15, 8))]
)
def test_all_cores_all_but_one_and_half_of_them_are_compared(
    cores: int, expected: tuple[int, ...]
) -> None:
    assert thread_counts(cores) == expected


@pytest.mark.parametrize(
    ("speeds", "cores", "expected"),
    [
        ({}, 8, 8),
        ({8: 100.0, 7: 100.0, 4: 90.0}, 8, 8),
        ({8: 100.0, 7: 104.0}, 8, 8),  # within the error of a measurement
        ({8: 100.0, 7: 106.0, 4: 150.0}, 8, 4),
        ({2: 32.0, 1: 135.0}, 2, 1),
        ({8: 100.0, 4: 150.0}, 4, 4),  # another instance has the other cores
        ({7: 100.0}, 8, 8),  # nothing to compare it with
    ],
)
def test_the_fastest_count_is_taken_if_it_is_clearly_faster(
    speeds: Mapping[int, float], cores: int, expected: int
) -> None:
    assert fastest_count(speeds, cores) == expected


def test_each_count_is_tried_once() -> None:
    tried: dict[int, ThreadSpeeds] = {}
    order = []
    while count := next_untried(tried, 8):
        order.append(count)
        tried[count] = ThreadSpeeds(decode=10.0)
    assert order == [8, 7, 4]


def test_figures_that_were_not_measured_are_left_out() -> None:
    measured = {2: ThreadSpeeds(10.0, 20.0), 1: ThreadSpeeds(12.0, None, 9.0)}
    assert known_speeds(measured, "decode") == {2: 10.0, 1: 12.0}
    assert known_speeds(measured, "prefill") == {2: 20.0}
    assert known_speeds(measured, "together") == {1: 9.0}
