"""Both sides are compared with the same proportions of busy and quiet moments."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.experiments.verdict import Value, count, under_equal_load

# A value tells its load, so that the picked values can be counted.
conversations = st.lists(st.lists(st.integers(0, 3).map(lambda n: (float(n), n)), max_size=20))


def loads(picked: list[list[float]]) -> Counter[float]:
    return Counter(value for entry in picked for value in entry)


@given(base=conversations, trial=conversations)
def test_the_loads_of_both_sides_have_the_same_proportions(
    base: list[list[Value]], trial: list[list[Value]]
) -> None:
    left, right = under_equal_load(base, trial)
    sizes = max(1, count(base)), max(1, count(trial))
    for load in range(4):
        share = loads(left)[load] / sizes[0]
        rounding = 1 / sizes[0] + 1 / sizes[1]
        assert share == pytest.approx(loads(right)[load] / sizes[1], abs=rounding)


@given(base=conversations)
def test_equal_sides_are_compared_whole(base: list[list[Value]]) -> None:
    left, right = under_equal_load(base, base)
    assert left == right
    assert count(left) == count(base)


def test_loads_that_only_one_side_had_are_left_out() -> None:
    left, right = under_equal_load([[(1.0, 0)] * 4], [[(2.0, 1)] * 4])
    assert (left, right) == ([], [])
