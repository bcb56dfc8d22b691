"""How an instance is replaced: new first where it serves and memory allows, else in place."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import GIB, engine, model

from supervisor.fleet.room import Way, fits, need_bytes, serves, way
from supervisor.life.facts import InstanceFacts
from supervisor.life.launch import Endpoint
from supervisor.life.lifecycle import State
from supervisor.profile.plan import Plan

OWN = 300 * 1024**2
PLAN = Plan(
    model="chat",
    engine=engine(),
    gguf=model(),
    lines=(),
    omitted=(),
    warnings=(),
    slots=4,
    ctx_size=16384,
)


def facts(state: State, *, wanted: bool = True) -> InstanceFacts:
    return InstanceFacts(
        name="chat.0",
        model="chat",
        state=state,
        wanted=wanted,
        run=1,
        pid=1,
        since_s=0,
        up_s=0,
        restarts=0,
        faults=0,
        retry_in_s=None,
        cause=None,
        warnings=(),
        load_progress=None,
        endpoint=Endpoint(),
        api_key="",
        log_path=None,
    )


@pytest.mark.parametrize("state", State)
def test_what_serves_nobody_is_replaced_in_its_place(state: State) -> None:
    serving = state in {State.READY, State.UNWELL}
    assert serves(facts(state)) == serving
    assert way(facts(state), has_room=True) is (Way.NEW_FIRST if serving else Way.IN_PLACE)
    assert way(facts(state), has_room=False) is Way.IN_PLACE


@pytest.mark.parametrize("state", State)
def test_what_nobody_wants_up_is_left_alone(state: State) -> None:
    assert way(facts(state, wanted=False), has_room=True) is Way.AT_NEXT_START
    assert not serves(facts(state, wanted=False))


def test_weights_of_the_same_file_are_in_memory_once() -> None:
    assert need_bytes(OWN, PLAN, PLAN) == OWN


@pytest.mark.parametrize("change", [{"path": Path("/other.gguf")}, {"fingerprint": "1" * 32}])
def test_weights_of_another_file_are_added(change: dict[str, object]) -> None:
    after = replace(PLAN, gguf=model(**change))
    assert need_bytes(OWN, PLAN, after) == OWN + after.gguf.tensor_bytes


def test_a_longer_context_needs_more_and_a_shorter_one_is_not_trusted_to_need_less() -> None:
    assert need_bytes(OWN, PLAN, replace(PLAN, ctx_size=2 * PLAN.ctx_size)) == 2 * OWN
    assert need_bytes(OWN, PLAN, replace(PLAN, ctx_size=PLAN.ctx_size // 2)) == OWN
    assert need_bytes(OWN, replace(PLAN, ctx_size=0), PLAN) == OWN


@given(need=st.integers(0, 8 * GIB), available=st.integers(0, 8 * GIB))
def test_a_reserve_of_a_twentieth_is_left(need: int, available: int) -> None:
    has_room = fits(need, available_bytes=available, memory_bytes=20 * GIB)
    assert has_room == (available - need >= GIB)
