import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.life.restart import Memory, Policy, Verdict, judge

POLICY = Policy(base_s=0.5, cap_s=60, breaker=5, half_life_s=300)


def faults(*at_s: float, policy: Policy = POLICY, chance: float = 1) -> list[Verdict]:
    """Judge faults at these times, one after the other."""
    verdicts: list[Verdict] = []
    memory = Memory()
    for now_s in at_s:
        verdicts.append(judge(policy, memory, now_s=now_s, chance=chance))
        memory = verdicts[-1].memory
    return verdicts


def test_the_longest_wait_doubles_with_each_fault() -> None:
    assert [v.delay_s for v in faults(0, 0, 0, 0)] == [0.5, 1, 2, 4]


def test_the_wait_never_exceeds_its_cap() -> None:
    patient = Policy(breaker=10_000)
    assert max(v.delay_s or 0 for v in faults(*[0.0] * 2000, policy=patient)) == 60


def test_chance_spreads_the_wait_from_nothing_to_its_bound() -> None:
    assert [v.delay_s for v in faults(0, 0, chance=0.25)] == [0.125, 0.25]
    assert [v.delay_s for v in faults(0, 0, chance=0)] == [0, 0]


def test_five_faults_close_together_open_the_breaker() -> None:
    verdicts = faults(0, 5, 10, 15, 20)
    assert [v.delay_s is None for v in verdicts] == [False, False, False, False, True]
    assert [v.memory.faults for v in verdicts] == [1, 2, 3, 4, 5]


def test_faults_an_hour_apart_never_open_it() -> None:
    assert all(v.delay_s is not None for v in faults(*(3600.0 * n for n in range(1000))))


def test_the_memory_halves_in_its_half_life() -> None:
    assert faults(0, 300)[-1].memory.weight == pytest.approx(1.5)


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted), st.floats(0, 1, exclude_max=True))
def test_a_wait_is_never_negative_nor_above_the_cap(at_s: list[float], chance: float) -> None:
    delays = [v.delay_s for v in faults(*at_s, chance=chance) if v.delay_s is not None]
    assert all(0 <= delay_s <= 60 for delay_s in delays)


@given(st.lists(st.floats(0, 1e6), min_size=1).map(sorted))
def test_an_open_breaker_means_that_many_faults_at_least(at_s: list[float]) -> None:
    verdicts = faults(*at_s)
    assert all(v.delay_s is not None for v in verdicts[:4])


def test_where_it_cannot_give_up_it_waits_no_longer_than_before_its_last_try() -> None:
    memory, delays = Memory(), list[float | None]()
    for _ in range(50):
        verdict = judge(POLICY, memory, now_s=0, chance=1, can_give_up=False)
        memory = verdict.memory
        delays.append(verdict.delay_s)
    assert delays == [0.5, 1, 2, *[4] * 47]


def test_it_never_gives_up_with_a_breaker_of_one_either() -> None:
    once = Policy(breaker=1)
    verdict = judge(once, Memory(1, 0), now_s=0, chance=1, can_give_up=False)
    assert verdict == Verdict(Memory(1, 0), 0.5)
