"""How many rounds there are, in which order, and how long they will take."""

from __future__ import annotations

import io

import pytest

from supervisor.bench.runner import Progress, RoundLimits
from supervisor.output import ProgressMeter


@pytest.mark.parametrize(
    ("limits", "done", "elapsed_s"),
    [
        (RoundLimits(None, None), 4, 1e6),
        (RoundLimits(None, 1), 7, 49),
        (RoundLimits(None, 1), 0, 999),
    ],
)
def test_a_round_begins_if_it_fits(limits: RoundLimits, done: int, elapsed_s: float) -> None:
    assert limits.may_begin(done, elapsed_s, longest_s=10)


@pytest.mark.parametrize(
    ("limits", "done", "elapsed_s"),
    [
        (RoundLimits(None, None), 5, 0),
        (RoundLimits(2, None), 2, 0),
        (RoundLimits(None, 1), 7, 51),
        (RoundLimits(3, 1), 3, 0),
    ],
)
def test_no_round_begins_beyond_its_limits(
    limits: RoundLimits, done: int, elapsed_s: float
) -> None:
    assert not limits.may_begin(done, elapsed_s, longest_s=10)


def test_the_time_decides_the_number_of_rounds_only_if_set() -> None:
    assert RoundLimits(None, None).planned_rounds == 5
    assert RoundLimits(None, 2).planned_rounds is None


def progress(limits: RoundLimits) -> Progress:
    found = Progress("bench chat", 4, limits, ProgressMeter(io.StringIO()))
    found.begin_round()
    for elapsed_s in (1, 5, 6):
        found.add(elapsed_s)
    return found


def test_the_remaining_time_is_of_the_steps_ahead() -> None:
    found = progress(RoundLimits(2, None))
    assert found.remaining_s(6) == pytest.approx(5 * 2)
    assert found.remaining_s(9) == pytest.approx(5 * 2 - 3)
    assert found.remaining_s(99) == 0


def test_the_remaining_time_never_exceeds_the_limit() -> None:
    found = progress(RoundLimits(None, 1))
    assert found.remaining_s(6) == pytest.approx(54)
    assert found.remaining_s(70) == 0


def test_the_line_names_round_step_and_time() -> None:
    stream, limits = io.StringIO(), RoundLimits(2, None)
    shown = Progress("bench chat", 4, limits, ProgressMeter(stream))
    with shown.step("base", "start"):
        pass
    shown.begin_round()
    with shown.step("base", "chat"):
        pass
    assert stream.getvalue().splitlines()[0] == "bench chat · 0 % · first start · base: start"
