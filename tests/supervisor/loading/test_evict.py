"""Which models are unloaded so that another one fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from supervisor.loading.decide import Admission, ModelState
from supervisor.loading.memory_usage import fits

OLD = ModelState("a", "loaded", required={"host": 10}, idle_s=100, resident_s=1e6, reload_cost_s=2)


def candidate(name: str, **changes: Any) -> ModelState:
    return replace(OLD, name=name, **changes)


def victims(required: int, free: int, *candidates: ModelState) -> tuple[str, ...] | None:
    return victims_of({"host": required}, {"host": free}, candidates)


def victims_of(
    required: dict[str, int], free: dict[str, int], candidates: Iterable[ModelState]
) -> tuple[str, ...] | None:
    return Admission(ModelState("new", "down", required=required), free).victims(candidates)


def test_nothing_is_unloaded_if_there_is_room() -> None:
    assert fits({"host": 10}, {"host": 10})
    assert victims(10, 10, OLD) == ()


def test_memory_that_is_not_listed_or_overdrawn_has_no_room() -> None:
    assert not fits({"host": 1, "GPU": 1}, {"host": 1})
    assert not fits({"host": 1}, {"host": -5})


def test_there_is_no_choice_where_unloading_all_is_not_enough() -> None:
    assert victims(20, 9, OLD) is None


def test_the_longest_idle_model_is_unloaded() -> None:
    assert victims(10, 4, candidate("b", idle_s=10), OLD) == ("a",)


def test_a_slow_load_or_a_long_conversation_keeps_a_model_longer() -> None:
    slow = candidate("b", reload_cost_s=60)
    cached = candidate("c", cached_tokens=20_000)
    assert victims(10, 0, slow, cached, OLD) == ("a",)
    assert victims(20, 0, slow, cached, OLD) == ("a", "b")


def test_no_model_is_unloaded_needlessly() -> None:
    small = candidate("a", required={"host": 1})
    large = candidate("b", idle_s=50, required={"host": 50})
    assert victims(20, 0, small, large) == ("b",)


def test_room_in_main_memory_is_no_help_where_a_device_is_full() -> None:
    on_device = candidate("b", idle_s=1, required={"host": 1, "GPU": 8})
    found = victims_of({"host": 1, "GPU": 5}, {"host": 50, "GPU": 1}, [OLD, on_device])
    assert found == ("b",)


bytes_ = st.fixed_dictionaries({"host": st.integers(0, 40)}, optional={"GPU": st.integers(0, 40)})
candidates_ = st.lists(
    st.builds(
        ModelState,
        phase=st.just("loaded"),
        resident_s=st.just(1e6),
        name=st.uuids().map(str),
        idle_s=st.floats(0, 1e5),
        reload_cost_s=st.floats(0, 100),
        cached_tokens=st.integers(0, 100_000),
        required=bytes_,
    ),
    max_size=8,
    unique_by=lambda build: build.name,
)


def suffices(need: dict[str, int], free: dict[str, int], leaving: list[ModelState]) -> bool:
    return all(
        wanted <= free.get(name, 0) + sum(lease.required.get(name, 0) for lease in leaving)
        for name, wanted in need.items()
    )


@given(required=bytes_, free=bytes_, candidates=candidates_)
def test_the_victims_are_enough_and_none_is_superfluous(
    required: dict[str, int], free: dict[str, int], candidates: list[ModelState]
) -> None:
    found = victims_of(required, free, candidates)
    if found is None:
        assert not suffices(required, free, candidates)
        return
    leaving = [candidate for name in found for candidate in candidates if candidate.name == name]
    assert sorted(leaving, key=lambda lease: lease.eviction_value) == leaving
    assert suffices(required, free, leaving)
    for spared in leaving:
        assert not suffices(required, free, [lease for lease in leaving if lease is not spared])


@given(candidates=candidates_, required=st.integers(1, 40), idle_s=st.floats(0, 1e4))
def test_of_models_of_one_size_the_least_valuable_are_unloaded(
    candidates: list[ModelState], required: int, idle_s: float
) -> None:
    alike = [replace(candidate, required={"host": 5}, idle_s=idle_s) for candidate in candidates]
    found = victims_of({"host": required}, {"host": 0}, alike)
    in_order = tuple(entry.name for entry in sorted(alike, key=lambda entry: entry.eviction_value))
    assert found is None or found == in_order[: len(found)]
