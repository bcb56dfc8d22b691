"""Who comes into memory, who leaves for whom, and who waits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.admission.decide import Actions, decide
from supervisor.admission.model_state import ModelState
from supervisor.fleet.availability import Phase
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy

ROOM = {"host": 10}
RULES = EvictionSettings(eviction_wait_s=20.0, abandon_load_below=0.5)


def up(name: str, **others: Any) -> ModelState:
    resting = ModelState(
        name, Phase.LOADED, required={"host": 4}, resident_s=60.0, idle_s=30.0, reload_cost_s=1.0
    )
    return replace(resting, **others)


def called(name: str, waited_s: float = 0.0, **others: Any) -> ModelState:
    claim = ModelState(name, Phase.DOWN, required={"host": 4}, waiting=1, oldest_wait_s=waited_s)
    return replace(claim, **others)


def moves(*models: ModelState) -> Actions:
    present = [model for model in models if model.phase not in {Phase.DOWN, Phase.FAILED}]
    free = ROOM["host"] - sum(model.required["host"] for model in present)
    return decide(models, ROOM, {"host": free}, RULES)


def test_one_that_is_called_comes_where_there_is_room() -> None:
    assert moves(up("a"), called("b")) == Actions(load=("b",))


def test_one_that_nobody_calls_stays_away() -> None:
    assert moves(ModelState("a", Phase.DOWN, required={"host": 4})) == Actions()


def test_one_that_is_broken_comes_only_by_command() -> None:
    broken = called("a", phase=Phase.FAILED)
    assert moves(broken) == Actions()
    assert moves(replace(broken, is_commanded=True)).load == ("a",)


def test_the_idle_leave_for_one_that_is_called() -> None:
    found = moves(up("a", idle_s=5.0), up("b", idle_s=50.0), called("c"))
    assert found.unload == {"b": "c needs its memory"}
    assert not found.load
    assert not found.pause


def test_who_answered_just_now_is_waited_for_as_long_as_its_load_took() -> None:
    resting = up("a", idle_s=4.0, reload_cost_s=5.0)
    assert moves(resting, up("b", working=1), called("c")) == Actions(look_again_s=1.0)
    assert moves(replace(resting, idle_s=5.0), up("b", working=1), called("c")).unload


def test_where_nobody_works_a_moment_is_enough() -> None:
    resting = up("a", idle_s=0.2, reload_cost_s=5.0)
    rested = replace(resting, idle_s=0.3)
    others = ModelState("b", Phase.DOWN, required={"host": 4}), called("c", required={"host": 8})
    assert moves(resting, *others).look_again_s == pytest.approx(0.05)
    assert moves(rested, *others).unload == {"a": "c needs its memory"}


def test_a_command_does_not_wait_for_the_next_question() -> None:
    found = moves(up("a", idle_s=0.4), up("b", working=1), called("c", is_commanded=True))
    assert set(found.unload) == {"a"}


def test_whose_conversations_would_be_lost_leaves_later() -> None:
    found = moves(up("a", cached_tokens=5000), up("b", idle_s=10.0), called("c"))
    assert set(found.unload) == {"b"}


def test_room_that_is_being_made_is_waited_for() -> None:
    found = moves(up("a"), replace(up("b"), phase=Phase.UNLOADING), called("c"))
    assert found == Actions()


@pytest.mark.parametrize("work", [{"working": 1}, {"waiting": 1}])
def test_who_works_is_left_alone_until_the_wait_is_long(work: dict[str, int]) -> None:
    busy = up("a", **work), up("b", **work)
    early = moves(*busy, called("c", waited_s=5.0))
    assert early == Actions(look_again_s=15.0)
    late = moves(*busy, called("c", waited_s=20.0))
    assert len(late.pause) == 1
    assert set(late.unload) == (set() if "working" in work else set(late.pause))


def test_who_is_paused_stays_so_until_it_has_left() -> None:
    held = up("a", working=1, is_paused=True, cached_tokens=5000)
    found = moves(held, up("b", working=1), called("c", waited_s=20.0))
    assert found.pause == ("a",)


def test_a_command_does_not_wait_for_that() -> None:
    found = moves(up("a", working=1), up("b", working=1), called("c", is_commanded=True))
    assert len(found.pause) == 1


def test_who_came_just_now_may_stay_a_while() -> None:
    found = moves(up("a", resident_s=0.5), up("b", resident_s=1.5), called("c", waited_s=60.0))
    assert found == Actions(look_again_s=0.5)


def test_the_pinned_never_leave() -> None:
    pinned = ResidencyPolicy(pinned=True, ttl_s=1.0)
    found = moves(up("a", residency=pinned), up("b", residency=pinned), called("c", waited_s=60.0))
    assert found == Actions(
        refuse={"c": "there is no memory for it beside a, b, which never leaves"}
    )


def test_one_that_can_never_fit_may_try_for_its_start_says_reason() -> None:
    assert moves(up("a"), called("b", required={"host": 11})).load == ("b",)


def test_claims_are_served_in_the_order_of_their_waits() -> None:
    found = moves(up("a", idle_s=1.0), up("b", working=1), called("c", 1.0), called("d", 9.0))
    assert found.unload == {"a": "d needs its memory"}


def test_a_small_one_does_not_overtake_a_large_one() -> None:
    large, small = (
        called("large", 9.0, required={"host": 8}),
        called("small", 1.0, required={"host": 2}),
    )
    assert not moves(up("a", working=1), large, small).load


def test_commands_come_before_requests() -> None:
    found = moves(called("a", 9.0, required={"host": 8}), called("b", is_commanded=True))
    assert found.load == ("b",)


def test_a_model_nobody_asked_for_leaves_after_its_time() -> None:
    residency = ResidencyPolicy(ttl_s=60.0)
    assert moves(up("a", residency=residency, idle_s=59.0)) == Actions(look_again_s=1.0)
    assert moves(up("a", residency=residency, idle_s=60.0)).unload == {"a": "nobody asked for it"}
    assert moves(up("a", residency=residency, idle_s=60.0, working=1)) == Actions()


def test_a_start_nobody_waits_for_is_given_up_only_early_and_only_for_another() -> None:
    coming = up("a", phase=Phase.LOADING, required={"host": 8}, resident_s=0.0)
    assert not moves(coming).unload
    assert moves(replace(coming, progress=0.4), called("b")).unload == {"a": "b needs its memory"}
    assert not moves(replace(coming, progress=0.5), called("b")).unload
    assert not moves(replace(coming, waiting=1), called("b")).unload


GUESTS = st.lists(
    st.builds(
        ModelState,
        name=st.sampled_from("abcdef"),
        phase=st.sampled_from(Phase),
        residency=st.builds(
            ResidencyPolicy, pinned=st.booleans(), ttl_s=st.sampled_from([0.0, 30.0])
        ),
        required=st.fixed_dictionaries({"host": st.integers(1, 12)}),
        is_commanded=st.booleans(),
        waiting=st.integers(0, 2),
        oldest_wait_s=st.floats(0, 60),
        working=st.integers(0, 2),
        idle_s=st.floats(0, 60),
        resident_s=st.floats(0, 60),
        progress=st.floats(0, 1),
    ),
    unique_by=lambda model: model.name,
)


@given(GUESTS)
def test_whatever_happens_nobody_is_wronged(models: list[ModelState]) -> None:
    found = moves(*models)
    by_name = {model.name: model for model in models}
    for name in found.unload:
        model = by_name[name]
        assert not model.working
        assert not model.residency.pinned
        assert model.phase in {Phase.LOADED, Phase.LOADING}
    for name in found.load:
        assert by_name[name].phase in {Phase.DOWN, Phase.FAILED}
    for name in found.pause:
        assert by_name[name].phase in {Phase.LOADED, Phase.LOADING}
    present = [model for model in models if model.phase not in {Phase.DOWN, Phase.FAILED}]
    fitting = [by_name[name].required["host"] for name in found.load]
    taken = sum(model.required["host"] for model in present)
    assert taken + sum(size for size in fitting if size <= ROOM["host"]) <= max(10, taken)
