"""Which models are loaded, which are unloaded for them, and which wait."""

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_states import loaded, requested

from supervisor.fleet.model import Phase
from supervisor.loading.decide import Actions, ModelState, decide
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy

ROOM = {"host": 10}
RULES = EvictionSettings(eviction_wait_s=20.0, abandon_load_below=0.5)


def moves(*models: ModelState) -> Actions:
    present = [model for model in models if model.phase not in {"down", "failed"}]
    free = ROOM["host"] - sum(model.required["host"] for model in present)
    return decide(models, ROOM, {"host": free}, RULES)


def test_a_requested_model_is_loaded_if_there_is_room() -> None:
    assert moves(loaded("a"), requested("b")) == Actions(load=("b",))


def test_a_model_that_is_not_requested_is_not_loaded() -> None:
    assert moves(ModelState("a", "down", required={"host": 4})) == Actions()


def test_a_failed_model_is_loaded_only_by_command() -> None:
    broken = requested("a", phase="failed")
    assert moves(broken) == Actions()
    assert moves(replace(broken, is_commanded=True)).load == ("a",)


def test_an_idle_model_is_unloaded_for_a_requested_one() -> None:
    found = moves(loaded("a", idle_s=5.0), loaded("b", idle_s=50.0), requested("c"))
    assert found.unload == {"b": "c needs its memory"}
    assert not found.load
    assert not found.pause


def test_a_model_that_just_answered_is_kept_as_long_as_its_load_took() -> None:
    resting = loaded("a", idle_s=4.0, reload_cost_s=5.0)
    assert moves(resting, loaded("b", working=1), requested("c")) == Actions(look_again_s=1.0)
    assert moves(replace(resting, idle_s=5.0), loaded("b", working=1), requested("c")).unload


def test_where_no_model_is_busy_the_grace_is_short() -> None:
    resting = loaded("a", idle_s=0.2, reload_cost_s=5.0)
    rested = replace(resting, idle_s=0.3)
    others = ModelState("b", "down", required={"host": 4}), requested("c", required={"host": 8})
    assert moves(resting, *others).look_again_s == pytest.approx(0.05)
    assert moves(rested, *others).unload == {"a": "c needs its memory"}


def test_a_command_ignores_the_grace() -> None:
    found = moves(
        loaded("a", idle_s=0.4), loaded("b", working=1), requested("c", is_commanded=True)
    )
    assert set(found.unload) == {"a"}


def test_a_model_with_cached_conversations_is_unloaded_later() -> None:
    found = moves(loaded("a", cached_tokens=5000), loaded("b", idle_s=10.0), requested("c"))
    assert set(found.unload) == {"b"}


def test_memory_that_is_being_freed_is_waited_for() -> None:
    found = moves(loaded("a"), replace(loaded("b"), phase="unloading"), requested("c"))
    assert found == Actions()


@pytest.mark.parametrize("work", [{"working": 1}, {"waiting": 1}])
def test_a_busy_model_is_paused_only_after_a_long_wait(work: dict[str, int]) -> None:
    busy = loaded("a", **work), loaded("b", **work)
    early = moves(*busy, requested("c", waited_s=5.0))
    assert early == Actions(look_again_s=15.0)
    late = moves(*busy, requested("c", waited_s=20.0))
    assert len(late.pause) == 1
    assert set(late.unload) == (set() if "working" in work else set(late.pause))


def test_who_is_paused_stays_so_until_it_has_left() -> None:
    held = loaded("a", working=1, is_paused=True, cached_tokens=5000)
    found = moves(held, loaded("b", working=1), requested("c", waited_s=20.0))
    assert found.pause == ("a",)


def test_a_command_pauses_a_busy_model_at_once() -> None:
    found = moves(loaded("a", working=1), loaded("b", working=1), requested("c", is_commanded=True))
    assert len(found.pause) == 1


def test_a_model_that_was_just_loaded_stays_for_min_residency_s() -> None:
    found = moves(
        loaded("a", resident_s=0.5), loaded("b", resident_s=1.5), requested("c", waited_s=60.0)
    )
    assert found == Actions(look_again_s=0.5)


def test_a_pinned_model_is_never_unloaded() -> None:
    pinned = ResidencyPolicy(pinned=True, ttl_s=1.0)
    found = moves(
        loaded("a", residency=pinned), loaded("b", residency=pinned), requested("c", waited_s=60.0)
    )
    assert found == Actions(
        refuse={"c": "there is no memory for it beside a, b, which no request for it unloads"}
    )


def test_a_model_larger_than_the_capacity_is_started_for_its_error() -> None:
    assert moves(loaded("a"), requested("b", required={"host": 11})).load == ("b",)


def test_the_longest_waiting_model_is_first() -> None:
    found = moves(
        loaded("a", idle_s=1.0), loaded("b", working=1), requested("c", 1.0), requested("d", 9.0)
    )
    assert found.unload == {"a": "d needs its memory"}


def test_a_small_model_does_not_overtake_a_large_one() -> None:
    large, small = (
        requested("large", 9.0, required={"host": 8}),
        requested("small", 1.0, required={"host": 2}),
    )
    assert not moves(loaded("a", working=1), large, small).load


def test_commands_come_before_requests() -> None:
    found = moves(requested("a", 9.0, required={"host": 8}), requested("b", is_commanded=True))
    assert found.load == ("b",)


def test_a_model_is_unloaded_when_its_ttl_is_over() -> None:
    residency = ResidencyPolicy(ttl_s=60.0)
    assert moves(loaded("a", residency=residency, idle_s=59.0)) == Actions(look_again_s=1.0)
    assert moves(loaded("a", residency=residency, idle_s=60.0)).unload == {
        "a": "no request came within ttl_s"
    }
    assert moves(loaded("a", residency=residency, idle_s=60.0, working=1)) == Actions()


def test_keep_alive_wins_over_the_ttl_until_it_is_over() -> None:
    residency = ResidencyPolicy(ttl_s=60.0)
    kept = loaded("a", residency=residency, idle_s=70.0, keep_alive_s=100.0)
    assert moves(kept) == Actions(look_again_s=30.0)
    assert moves(replace(kept, idle_s=100.0)).unload == {
        "a": "the keep_alive of its latest request was 100 s"
    }
    assert moves(replace(kept, keep_alive_s=math.inf)) == Actions()


def test_a_keep_alive_of_0_unloads_a_model_when_its_last_request_ends() -> None:
    done = loaded("a", idle_s=0.0, keep_alive_s=0.0)
    assert moves(done).unload
    assert moves(replace(done, working=1)) == Actions()
    assert moves(replace(done, waiting=1)) == Actions()


def test_settings_limit_keep_alive() -> None:
    asked = loaded("a", idle_s=50.0, keep_alive_s=math.inf)
    most = ResidencyPolicy(keep_alive_max_s=60.0)
    assert moves(replace(asked, residency=most)) == Actions(look_again_s=10.0)
    ignored = ResidencyPolicy(keep_alive=False, ttl_s=90.0)
    assert moves(replace(asked, residency=ignored)) == Actions(look_again_s=40.0)
    at_once = replace(asked, keep_alive_s=0.0)
    assert not moves(replace(at_once, residency=ResidencyPolicy(pinned=True))).unload
    assert not moves(replace(at_once, residency=ResidencyPolicy(keep_alive=False))).unload


def test_a_model_that_keep_alive_holds_still_makes_room() -> None:
    kept = loaded("a", idle_s=50.0, keep_alive_s=math.inf, required={"host": 8})
    assert moves(kept, requested("b")).unload == {"a": "b needs its memory"}


def test_an_unneeded_load_is_abandoned_only_early_and_only_for_another_model() -> None:
    coming = loaded("a", phase="loading", required={"host": 8}, resident_s=0.0)
    assert not moves(coming).unload
    assert moves(replace(coming, progress=0.4), requested("b")).unload == {
        "a": "b needs its memory"
    }
    assert not moves(replace(coming, progress=0.5), requested("b")).unload
    assert not moves(replace(coming, waiting=1), requested("b")).unload


def test_a_pinned_model_is_not_abandoned_while_it_loads() -> None:
    loading = ModelState(
        "a",
        "loading",
        residency=ResidencyPolicy(pinned=True),
        required={"host": 6},
        progress=0.1,
    )
    assert not moves(loading, requested("b", waited_s=60.0, required={"host": 6})).unload


MODELS = st.lists(
    st.builds(
        ModelState,
        name=st.sampled_from("abcdef"),
        phase=st.sampled_from(get_args(Phase)),
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
        keep_alive_s=st.none() | st.floats(0, 60),
    ),
    unique_by=lambda model: model.name,
)


@given(MODELS)
def test_actions_never_cut_a_request_or_exceed_the_capacity(models: list[ModelState]) -> None:
    found = moves(*models)
    by_name = {model.name: model for model in models}
    for name in found.unload:
        model = by_name[name]
        assert not model.working
        assert not model.residency.pinned
        assert model.phase in {"loaded", "loading"}
    for name in found.load:
        assert by_name[name].phase in {"down", "failed"}
    for name in found.pause:
        assert by_name[name].phase in {"loaded", "loading"}
    present = [model for model in models if model.phase not in {"down", "failed"}]
    fitting = [by_name[name].required["host"] for name in found.load]
    taken = sum(model.required["host"] for model in present)
    assert taken + sum(size for size in fitting if size <= ROOM["host"]) <= max(10, taken)


def wanted_elsewhere(name: str, **others: Any) -> ModelState:
    return replace(ModelState(name, "down", required={"host": 4}, is_for_others=True), **others)


def test_a_model_that_another_machine_wants_is_loaded_if_there_is_room() -> None:
    assert moves(loaded("a"), wanted_elsewhere("b")) == Actions(load=("b",))


def test_none_in_use_goes_for_a_model_that_another_machine_wants() -> None:
    a, b = loaded("a", idle_s=599.0), loaded("b", working=1, idle_s=0.0)
    found = moves(a, b, wanted_elsewhere("c"))
    assert found.refuse == {"c": "too little memory is free for it"}
    assert not found.unload
    assert not found.pause
    unused = replace(a, idle_s=601.0)
    assert moves(unused, b, wanted_elsewhere("c")).unload == {"a": "c needs its memory"}
    pinned = replace(unused, residency=ResidencyPolicy(pinned=True))
    assert moves(pinned, b, wanted_elsewhere("c")).refuse
    assert moves(a, b, wanted_elsewhere("c", required={"host": 11})).refuse


def test_it_is_loaded_once_an_unused_model_has_gone() -> None:
    going = loaded("a", phase="unloading")
    found = moves(going, loaded("b"), wanted_elsewhere("c"))
    assert (found.load, found.unload, found.refuse) == ((), {}, {})


def test_what_is_wanted_here_comes_first_and_is_treated_as_ever() -> None:
    found = moves(loaded("a"), wanted_elsewhere("b"), requested("c"))
    assert found.load == ("c",)
    assert found.refuse.keys() == {"b"}
    both = wanted_elsewhere("c", waiting=1)
    assert moves(loaded("a"), loaded("b"), both).unload
