import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.engine.backoff import FailureHistory, decide
from supervisor.settings.tables import RestartPolicy

POLICY = RestartPolicy(
    backoff_initial_s=0.5, backoff_max_s=60, max_failures=5, failure_half_life_s=300
)


def failures(
    *at_s: float, policy: RestartPolicy = POLICY, chance: float = 1
) -> list[tuple[FailureHistory, float | None]]:
    """Judge faults at these times, one after the other."""
    decisions: list[tuple[FailureHistory, float | None]] = []
    history: FailureHistory = 0, 0
    for now_s in at_s:
        decisions.append(decide(policy, history, now_s=now_s, chance=chance))
        history = decisions[-1][0]
    return decisions


def test_the_longest_wait_doubles_with_each_fault() -> None:
    assert [delay_s for _, delay_s in failures(0, 0, 0, 0)] == [0.5, 1, 2, 4]


def test_the_wait_never_exceeds_its_cap() -> None:
    patient = RestartPolicy(max_failures=1000)
    assert max(delay_s or 0 for _, delay_s in failures(*[0.0] * 2000, policy=patient)) == 60


def test_chance_spreads_the_wait_from_nothing_to_its_bound() -> None:
    assert [delay_s for _, delay_s in failures(0, 0, chance=0.25)] == [0.125, 0.25]
    assert [delay_s for _, delay_s in failures(0, 0, chance=0)] == [0, 0]


def test_five_failures_close_together_open_the_breaker() -> None:
    decisions = failures(0, 5, 10, 15, 20)
    assert [delay_s is None for _, delay_s in decisions] == [False, False, False, False, True]
    assert [math.ceil(weight) for (weight, _), _ in decisions] == [1, 2, 3, 4, 5]


def test_failures_an_hour_apart_never_open_it() -> None:
    assert all(delay_s is not None for _, delay_s in failures(*(3600.0 * n for n in range(1000))))


def test_the_history_halves_in_its_half_life() -> None:
    assert failures(0, 300)[-1][0][0] == pytest.approx(1.5)


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0, 1, exclude_max=True))
def test_a_wait_is_never_negative_nor_above_the_cap(at_s: list[float], chance: float) -> None:
    delays = [delay_s for _, delay_s in failures(*at_s, chance=chance) if delay_s is not None]
    assert all(0 <= delay_s <= 60 for delay_s in delays)


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted))
def test_an_open_breaker_means_that_many_failures_at_least(at_s: list[float]) -> None:
    decisions = failures(*at_s)
    assert all(delay_s is not None for _, delay_s in decisions[:4])


def test_where_it_cannot_give_up_it_waits_no_longer_than_before_its_last_try() -> None:
    history: FailureHistory = 0, 0
    delays = list[float | None]()
    for _ in range(50):
        history, delay_s = decide(POLICY, history, now_s=0, chance=1, can_give_up=False)
        delays.append(delay_s)
    assert delays == [0.5, 1, 2, *[4] * 47]


def test_it_never_gives_up_with_a_breaker_of_one_either() -> None:
    once = RestartPolicy(max_failures=1)
    decision = decide(once, (1, 0), now_s=0, chance=1, can_give_up=False)
    assert decision == ((1, 0), 0.5)
