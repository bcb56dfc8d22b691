"""Who comes into memory, who leaves for whom, and who waits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.fleet.guest import Guest, Phase, Rules, Stay
from supervisor.fleet.residency import Moves, decide

ROOM = {"host": 10}
RULES = Rules(swap_wait_s=20.0, give_up_below=0.5)


def up(name: str, **others: Any) -> Guest:
    resting = Guest(
        name, Phase.UP, takes={"host": 4}, resident_s=60.0, idle_s=30.0, reload_cost_s=1.0
    )
    return replace(resting, **others)


def called(name: str, waited_s: float = 0.0, **others: Any) -> Guest:
    claim = Guest(name, Phase.DOWN, takes={"host": 4}, waiting=1, oldest_wait_s=waited_s)
    return replace(claim, **others)


def moves(*guests: Guest) -> Moves:
    present = [guest for guest in guests if guest.phase not in {Phase.DOWN, Phase.BROKEN}]
    free = ROOM["host"] - sum(guest.takes["host"] for guest in present)
    return decide(guests, ROOM, {"host": free}, RULES)


def test_one_that_is_called_comes_where_there_is_room() -> None:
    assert moves(up("a"), called("b")) == Moves(load=("b",))


def test_one_that_nobody_calls_stays_away() -> None:
    assert moves(Guest("a", Phase.DOWN, takes={"host": 4})) == Moves()


def test_one_that_is_broken_comes_only_by_command() -> None:
    broken = called("a", phase=Phase.BROKEN)
    assert moves(broken) == Moves()
    assert moves(replace(broken, is_wished=True)).load == ("a",)


def test_the_idle_leave_for_one_that_is_called() -> None:
    found = moves(up("a", idle_s=5.0), up("b", idle_s=50.0), called("c"))
    assert found.unload == {"b": "c needs its memory"}
    assert not found.load
    assert not found.hold


def test_who_answered_just_now_is_waited_for_as_long_as_its_load_took() -> None:
    resting = up("a", idle_s=4.0, reload_cost_s=5.0)
    assert moves(resting, up("b", working=1), called("c")) == Moves(look_again_s=1.0)
    assert moves(replace(resting, idle_s=5.0), up("b", working=1), called("c")).unload


def test_where_nobody_works_a_moment_is_enough() -> None:
    resting = up("a", idle_s=0.2, reload_cost_s=5.0)
    rested = replace(resting, idle_s=0.3)
    others = Guest("b", Phase.DOWN, takes={"host": 4}), called("c", takes={"host": 8})
    assert moves(resting, *others).look_again_s == pytest.approx(0.05)
    assert moves(rested, *others).unload == {"a": "c needs its memory"}


def test_a_command_does_not_wait_for_the_next_question() -> None:
    found = moves(up("a", idle_s=0.4), up("b", working=1), called("c", is_wished=True))
    assert set(found.unload) == {"a"}


def test_whose_conversations_would_be_lost_leaves_later() -> None:
    found = moves(up("a", cached_tokens=5000), up("b", idle_s=10.0), called("c"))
    assert set(found.unload) == {"b"}


def test_room_that_is_being_made_is_waited_for() -> None:
    found = moves(up("a"), replace(up("b"), phase=Phase.GOING), called("c"))
    assert found == Moves()


@pytest.mark.parametrize("work", [{"working": 1}, {"waiting": 1}])
def test_who_works_is_left_alone_until_the_wait_is_long(work: dict[str, int]) -> None:
    busy = up("a", **work), up("b", **work)
    early = moves(*busy, called("c", waited_s=5.0))
    assert early == Moves(look_again_s=15.0)
    late = moves(*busy, called("c", waited_s=20.0))
    assert len(late.hold) == 1
    assert set(late.unload) == (set() if "working" in work else set(late.hold))


def test_who_is_held_stays_so_until_it_has_left() -> None:
    held = up("a", working=1, is_held=True, cached_tokens=5000)
    found = moves(held, up("b", working=1), called("c", waited_s=20.0))
    assert found.hold == ("a",)


def test_a_command_does_not_wait_for_that() -> None:
    found = moves(up("a", working=1), up("b", working=1), called("c", is_wished=True))
    assert len(found.hold) == 1


def test_who_came_just_now_may_stay_a_while() -> None:
    found = moves(up("a", resident_s=0.5), up("b", resident_s=1.5), called("c", waited_s=60.0))
    assert found == Moves(look_again_s=0.5)


def test_the_pinned_never_leave() -> None:
    pinned = Stay(is_pinned=True, ttl_s=1.0)
    found = moves(up("a", stay=pinned), up("b", stay=pinned), called("c", waited_s=60.0))
    assert found == Moves(refuse={"c": "there is no memory for it beside a, b, which never leaves"})


def test_one_that_can_never_fit_may_try_for_its_start_says_why() -> None:
    assert moves(up("a"), called("b", takes={"host": 11})).load == ("b",)


def test_claims_are_served_in_the_order_of_their_waits() -> None:
    found = moves(up("a", idle_s=1.0), up("b", working=1), called("c", 1.0), called("d", 9.0))
    assert found.unload == {"a": "d needs its memory"}


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    large, small = called("large", 9.0, takes={"host": 8}), called("small", 1.0, takes={"host": 2})
    assert not moves(up("a", working=1), large, small).load


def test_commands_come_before_requests() -> None:
    found = moves(called("a", 9.0, takes={"host": 8}), called("b", is_wished=True))
    assert found.load == ("b",)


def test_a_model_nobody_asked_for_leaves_after_its_time() -> None:
    stay = Stay(ttl_s=60.0)
    assert moves(up("a", stay=stay, idle_s=59.0)) == Moves(look_again_s=1.0)
    assert moves(up("a", stay=stay, idle_s=60.0)).unload == {"a": "nobody asked for it"}
    assert moves(up("a", stay=stay, idle_s=60.0, working=1)) == Moves()


def test_a_start_nobody_waits_for_is_given_up_only_early_and_only_for_another() -> None:
    coming = up("a", phase=Phase.COMING, takes={"host": 8}, resident_s=0.0)
    assert not moves(coming).unload
    assert moves(replace(coming, progress=0.4), called("b")).unload == {"a": "b needs its memory"}
    assert not moves(replace(coming, progress=0.5), called("b")).unload
    assert not moves(replace(coming, waiting=1), called("b")).unload


GUESTS = st.lists(
    st.builds(
        Guest,
        name=st.sampled_from("abcdef"),
        phase=st.sampled_from(Phase),
        stay=st.builds(Stay, is_pinned=st.booleans(), ttl_s=st.sampled_from([0.0, 30.0])),
        takes=st.fixed_dictionaries({"host": st.integers(1, 12)}),
        is_wished=st.booleans(),
        waiting=st.integers(0, 2),
        oldest_wait_s=st.floats(0, 60),
        working=st.integers(0, 2),
        idle_s=st.floats(0, 60),
        resident_s=st.floats(0, 60),
        progress=st.floats(0, 1),
    ),
    unique_by=lambda guest: guest.name,
)


@given(GUESTS)
def test_whatever_happens_nobody_is_wronged(guests: list[Guest]) -> None:
    found = moves(*guests)
    by_name = {guest.name: guest for guest in guests}
    for name in found.unload:
        guest = by_name[name]
        assert not guest.working
        assert not guest.stay.is_pinned
        assert guest.phase in {Phase.UP, Phase.COMING}
    for name in found.load:
        assert by_name[name].phase in {Phase.DOWN, Phase.BROKEN}
    for name in found.hold:
        assert by_name[name].phase in {Phase.UP, Phase.COMING}
    present = [guest for guest in guests if guest.phase not in {Phase.DOWN, Phase.BROKEN}]
    fitting = [by_name[name].takes["host"] for name in found.load]
    taken = sum(guest.takes["host"] for guest in present)
    assert taken + sum(size for size in fitting if size <= ROOM["host"]) <= max(10, taken)
