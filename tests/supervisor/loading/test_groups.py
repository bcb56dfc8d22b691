"""Models that groups keep apart or together, where memory has room for all, or for few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.model_states import loaded, requested

from proxy.observe.record import LoadCause
from proxy.router.router import Router
from supervisor.engine.states import State
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.planner import LaunchPlanner
from supervisor.loading.controller import AdmissionController
from supervisor.loading.decide import Actions, Eviction, ModelState, decide, eviction, rule_against
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.settings.groups import Groups, GroupSettings, Rule
from supervisor.settings.schema import EvictionSettings, ResidencyPolicy, Settings
from supervisor.system.paths import Directories

RULES = EvictionSettings(eviction_wait_s=20.0)
ONE_OF_TWO = "at most 1 of a, b may be loaded at the same time (groups.g)"


def groups(*models: str, **rules: Any) -> Groups:
    return Groups({"g": GroupSettings(models=models, **rules)})


def moves(rules: Groups, *models: ModelState, room: int = 100) -> Actions:
    present = [model for model in models if model.phase not in {"down", "failed"}]
    free = room - sum(model.required["host"] for model in present)
    return decide(models, {"host": room}, {"host": free}, RULES, groups=rules)


def test_a_model_goes_for_another_of_its_group_although_memory_has_room() -> None:
    found = moves(groups("a", "b", max_loaded=1), loaded("a"), loaded("c"), requested("b"))
    assert found == Actions(unload={"a": f"b was requested: {ONE_OF_TWO}"})


def test_a_model_outside_the_group_loads_beside_it() -> None:
    assert moves(groups("a", "b", max_loaded=1), loaded("a"), requested("c")).load == ("c",)


def test_the_least_valuable_goes_when_a_group_is_full() -> None:
    rules = groups("a", "b", "c", max_loaded=2)
    found = moves(rules, loaded("a", idle_s=5.0), loaded("b", idle_s=50.0), requested("c"))
    assert found.unload.keys() == {"b"}


def test_no_answer_is_cut_by_a_rule() -> None:
    rules, busy = groups("a", "b", max_loaded=1), loaded("a", working=1, idle_s=0.0)
    assert moves(rules, busy, requested("b")) == Actions(look_again_s=20.0)
    assert moves(rules, busy, requested("b", 20.0)) == Actions(pause=("a",))
    leaving = replace(busy, phase="unloading", working=0)
    assert moves(rules, leaving, requested("b", 20.0)) == Actions()


def test_of_two_requested_models_the_second_waits_for_the_first() -> None:
    found = moves(groups("a", "b", max_loaded=1), requested("a", 9.0), requested("b", 1.0))
    assert (found.load, found.refuse) == (("a",), {})


def test_an_exclusive_group_and_other_models_unload_each_other_except_pinned_ones() -> None:
    pinned = loaded("p", residency=ResidencyPolicy(pinned=True))
    rules = replace(groups("a", "b", exclusive=True), pinned=frozenset("p"))
    assert moves(rules, pinned, loaded("c"), requested("a")).unload.keys() == {"c"}
    assert moves(rules, pinned, loaded("a"), loaded("b"), requested("c")).unload.keys() == {
        "a",
        "b",
    }
    assert moves(rules, pinned, loaded("a"), requested("b")).load == ("b",)
    assert moves(rules, loaded("a"), replace(pinned, phase="down", waiting=1)).load == ("p",)


def test_models_that_stay_together_make_room_by_others_or_not_at_all() -> None:
    rules = groups("a", "b", together=True)
    kept, other = loaded("a", idle_s=900.0), loaded("c", idle_s=1.0)
    assert moves(rules, kept, other, requested("b"), room=8).unload == {"c": "b needs its memory"}
    found = moves(rules, kept, requested("b", 60.0), room=4)
    assert found == Actions(
        refuse={"b": "there is no memory for it beside a, which no request for it unloads"}
    )


def test_another_machine_unloads_by_a_rule_only_what_is_unused() -> None:
    rules, wanted = groups("a", "b", max_loaded=1), ModelState("b", "down", is_for_others=True)
    assert moves(rules, loaded("a"), wanted).refuse == {"b": ONE_OF_TWO}
    assert moves(rules, loaded("a", idle_s=601.0), wanted).unload.keys() == {"a"}


def test_the_forecast_names_the_rule() -> None:
    rules = groups("a", "b", max_loaded=1)
    models = loaded("a"), ModelState("b", "down", required={"host": 4})

    def decided(states: Sequence[ModelState]) -> Actions:
        return moves(rules, *states)

    assert eviction("b", models, decided, 20.0) == Eviction(("a",))
    assert str(rule_against("b", models, rules)) == ONE_OF_TWO
    assert rule_against("a", models, rules) is None


def test_a_request_that_waits_by_a_rule_tells_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"path": "/models/chat.gguf"}
    settings = Settings(
        models={"a": entry, "b": entry}, groups={"large": {"models": ["a", "b"], "max_loaded": 1}}
    )
    planner, router = LaunchPlanner(settings, Directories(*[tmp_path] * 5)), Router()
    fleet = Fleet(planner, router, lambda *_, **__: None)
    decisions = AdmissionController(
        fleet, router, lambda *_, **__: None, MemoryUsage(fleet), lambda: 0.0
    )
    with decisions.request_load(fleet.models["b"]):
        assert decisions.load_cause("b", LoadCause()) == LoadCause()
        instance = fleet.replica("a.0").instance
        ready = replace(instance.snapshot(), state=State.READY)
        monkeypatch.setattr(instance, "snapshot", lambda: ready)
        assert decisions.load_cause("b", LoadCause()) == LoadCause(load_group="large")


MODELS = st.lists(
    st.builds(
        ModelState,
        name=st.sampled_from("abcdef"),
        phase=st.sampled_from(["down", "loading", "loaded", "unloading"]),
        required=st.just({"host": 4}),
        waiting=st.integers(0, 1),
        oldest_wait_s=st.floats(0, 60),
        working=st.integers(0, 1),
        resident_s=st.floats(0, 60),
    ),
    unique_by=lambda model: model.name,
)
GROUPS = st.dictionaries(
    st.sampled_from("gh"),
    st.builds(
        GroupSettings,
        models=st.lists(st.sampled_from("abcdef"), min_size=1, unique=True).map(tuple),
        max_loaded=st.integers(1, 3),
        exclusive=st.booleans(),
    ),
).map(Groups)


@given(MODELS, GROUPS)
def test_no_load_breaks_a_rule_and_no_answer_is_cut(
    models: list[ModelState], rules: Groups
) -> None:
    found = moves(rules, *models)
    present = {model.name for model in models if model.phase != "down"}
    for name in found.load:
        assert not rules.rule_against(name, present)
        present.add(name)
    assert not any(model.working for model in models if model.name in found.unload)


def test_a_start_loads_the_first_models_that_may_be_together() -> None:
    rules = replace(groups("a", "b", "p", max_loaded=1), pinned=frozenset("p"))
    assert rules.allowed("abcp") == ["p", "c"]


def test_rules_that_shut_a_model_out_are_found() -> None:
    rules = replace(groups("a", "b", max_loaded=1), pinned=frozenset("a"))
    assert list(rules.contradictions("abc")) == [
        Rule(
            "g",
            "b could never be loaded: at most 1 of a, b may be loaded at the same time, and no "
            "request for it unloads a",
        )
    ]
    more = replace(rules, pinned=frozenset("ac"))
    assert next(more.contradictions("abc")).clause.endswith("it unloads a")
    both = Groups(
        {
            "g": GroupSettings(models=("a", "b"), together=True),
            "h": GroupSettings(models=("b",), exclusive=True),
        }
    )
    assert [rule.group for rule in both.contradictions("abc")] == ["h"]
    pinned_inside = replace(groups("a", exclusive=True), pinned=frozenset("a"))
    assert [rule.clause.split(" ")[0] for rule in pinned_inside.contradictions("ab")] == ["b"]
    assert not list(replace(pinned_inside, pinned=frozenset("b")).contradictions("ab"))
