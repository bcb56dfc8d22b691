"""The time of a pass, from when it was asked for and when the worker answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.rpc.relay import ComputeTimer


def test_one_pass_takes_until_the_response() -> None:
    timer = ComputeTimer()
    timer.note_command(1.0)
    assert timer.note_response(1.25) == (1, 0.25)
    assert timer.note_response(1.5) is None


@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.floats(0.001, 10), st.floats(0, 1))
def test_passes_that_wait_for_each_other_are_told_apart(
    pauses_s: list[float], each_s: float, start_s: float
) -> None:
    timer, asked_s, idle_at_s = ComputeTimer(), start_s, 0.0
    for pause_s in pauses_s:
        asked_s += pause_s
        timer.note_command(asked_s)
        idle_at_s = max(idle_at_s, asked_s) + each_s
    count, found_s = timer.note_response(idle_at_s) or (0, 0.0)
    assert count == len(pauses_s)
    assert found_s == pytest.approx(each_s, rel=1e-6, abs=1e-9)


def test_no_more_than_a_thousand_passes_are_kept() -> None:
    timer = ComputeTimer()
    for number in range(5000):
        timer.note_command(number)
    assert timer.note_response(5000) == (1024, 1.0)
