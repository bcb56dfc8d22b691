"""Who must leave so that another model fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from supervisor.admission.evict import (
    EvictionCandidate,
    EvictionDecision,
    EvictionVerdict,
    decide,
    value,
)

OLD = EvictionCandidate(
    name="a.0",
    model="a",
    is_pinned=False,
    is_idle=True,
    idle_s=100,
    resident_s=1000,
    reload_cost_s=2,
    cached_tokens=0,
    frees={"host": 10},
)


def candidate(name: str, **changes: Any) -> EvictionCandidate:
    return replace(OLD, name=name, **changes)


def decided(
    need: int, free: int, *candidates: EvictionCandidate, room: int = 100
) -> EvictionDecision:
    return decide(
        {"host": need}, {"host": free}, candidates, room={"host": room}, min_residency_s=30
    )


def test_what_has_room_sends_nobody_away() -> None:
    assert decided(10, 10, OLD) == EvictionDecision(EvictionVerdict.FITS)


def test_what_is_larger_than_the_machine_never_fits_and_sends_nobody_away() -> None:
    assert decided(101, 0, OLD) == EvictionDecision(EvictionVerdict.NEVER, short=(("host", 1),))


def test_the_one_that_was_idle_longest_leaves() -> None:
    found = decided(10, 4, candidate("b.0", idle_s=10), OLD)
    assert found == EvictionDecision(EvictionVerdict.EVICT, ("a.0",), (("host", 6),))


def test_what_loads_slowly_or_holds_a_long_conversation_stays_longer() -> None:
    slow = candidate("b.0", reload_cost_s=60)
    learned = candidate("c.0", cached_tokens=20_000)
    assert decided(10, 0, slow, learned, OLD).names == ("a.0",)
    assert decided(20, 0, slow, learned, OLD).names == ("a.0", "b.0")


def test_nobody_is_sent_away_for_nothing() -> None:
    small = candidate("a.0", frees={"host": 1})
    large = candidate("b.0", idle_s=50, frees={"host": 50})
    assert decided(20, 0, small, large).names == ("b.0",)


def test_who_works_is_waited_for() -> None:
    assert decided(10, 0, candidate("b.0", is_idle=False)).verdict is EvictionVerdict.WAIT


def test_who_is_pinned_or_came_just_now_is_not_sent_away() -> None:
    assert decided(10, 0, candidate("b.0", is_pinned=True)).verdict is EvictionVerdict.WAIT
    assert decided(10, 0, candidate("b.0", resident_s=29)).verdict is EvictionVerdict.WAIT
    assert decided(10, 0, candidate("b.0", resident_s=30)).verdict is EvictionVerdict.EVICT


def test_room_in_main_memory_is_no_help_where_a_device_is_full() -> None:
    on_device = candidate("b.0", idle_s=1, frees={"host": 1, "GPU": 8})
    found = decide(
        {"host": 1, "GPU": 5},
        {"host": 50, "GPU": 1},
        [OLD, on_device],
        room={"host": 100, "GPU": 9},
        min_residency_s=0,
    )
    assert found == EvictionDecision(EvictionVerdict.EVICT, ("b.0",), (("GPU", 4),))


bytes_ = st.fixed_dictionaries({"host": st.integers(0, 40)}, optional={"GPU": st.integers(0, 40)})
candidates_ = st.lists(
    st.builds(
        EvictionCandidate,
        name=st.uuids().map(str),
        model=st.just("a"),
        is_pinned=st.booleans(),
        is_idle=st.booleans(),
        idle_s=st.floats(0, 1e5),
        resident_s=st.floats(0, 100),
        reload_cost_s=st.floats(0, 100),
        cached_tokens=st.integers(0, 100_000),
        frees=bytes_,
    ),
    max_size=8,
    unique_by=lambda one: one.name,
)


def suffices(need: dict[str, int], free: dict[str, int], leaving: list[EvictionCandidate]) -> bool:
    return all(
        wanted <= free.get(name, 0) + sum(one.frees.get(name, 0) for one in leaving)
        for name, wanted in need.items()
    )


@given(need=bytes_, free=bytes_, room=bytes_, candidates=candidates_)
def test_a_decision_keeps_its_word(
    need: dict[str, int],
    free: dict[str, int],
    room: dict[str, int],
    candidates: list[EvictionCandidate],
) -> None:
    found = decide(need, free, candidates, room=room, min_residency_s=30)
    movable = [
        one for one in candidates if one.is_idle and not one.is_pinned and one.resident_s >= 30
    ]
    leaving = [one for name in found.names for one in candidates if one.name == name]
    assert all(one in movable for one in leaving)
    assert sorted(leaving, key=value) == leaving
    match found.verdict:
        case EvictionVerdict.NEVER:
            assert not suffices(need, room, [])
        case EvictionVerdict.FITS:
            assert suffices(need, free, [])
        case EvictionVerdict.WAIT:
            assert not suffices(need, free, movable)
        case EvictionVerdict.EVICT:
            assert not suffices(need, free, [])
            assert suffices(need, free, leaving)
            for spared in leaving:  # none of them for nothing
                assert not suffices(need, free, [one for one in leaving if one is not spared])
    assert bool(found.names) == (found.verdict is EvictionVerdict.EVICT)


@given(candidates=candidates_, need=st.integers(1, 40), idle_s=st.floats(0, 1e4))
def test_who_leaves_is_worth_no_more_than_one_alike_who_stays(
    candidates: list[EvictionCandidate], need: int, idle_s: float
) -> None:
    alike = [replace(one, frees={"host": 5}, idle_s=idle_s) for one in candidates]
    found = decide({"host": need}, {"host": 0}, alike, room={"host": 1000}, min_residency_s=30)
    movable = sorted(
        (one for one in alike if one.is_idle and not one.is_pinned and one.resident_s >= 30),
        key=value,
    )
    assert found.names == tuple(one.name for one in movable[: len(found.names)])
