"""How an instance is replaced."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.samples import GIB, engine, machine, model

from supervisor.builds.help import FlagValue
from supervisor.engine.client import Endpoint
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.fleet.replace import need_bytes, serves, strategy_for
from supervisor.fleet.start_memory import usable_bytes
from supervisor.models.metadata import Gguf
from supervisor.plan.estimate import MemoryInputs
from supervisor.plan.plan import Plan


def planned(of: Gguf | None = None, **flags: FlagValue) -> Plan:
    """Return a plan of four slots."""
    of = of or model()
    memory_inputs = MemoryInputs(
        of, {"parallel": 4, "ctx-size": 16384, "cache-ram": 512, **flags}, engine()
    )
    return Plan(
        "chat", engine(), of, (), (), (), slots=4, ctx_size=16384, memory_inputs=memory_inputs
    )


PLAN = planned()
OWN = PLAN.estimate.own_at_start_bytes


def facts(state: State, *, wanted: bool = True) -> InstanceSnapshot:
    return InstanceSnapshot(
        name="chat.0",
        model="chat",
        state=state,
        wanted=wanted,
        run=1,
        pid=1,
        since_s=0,
        up_s=0,
        restarts=0,
        failures=0,
        retry_in_s=None,
        cause=None,
        warnings=(),
        load_progress=None,
        endpoint=Endpoint(),
        api_key="",
        log_path=None,
    )


@pytest.mark.parametrize("state", State)
def test_an_instance_that_does_not_serve_is_restarted(state: State) -> None:
    serving = state in {State.READY, State.UNHEALTHY}
    assert serves(facts(state)) == serving
    assert strategy_for(facts(state), has_room=True) is ("rolling" if serving else "restart")
    assert strategy_for(facts(state), has_room=False) == "restart"


@pytest.mark.parametrize("state", State)
def test_an_instance_that_is_not_wanted_is_left_alone(state: State) -> None:
    assert strategy_for(facts(state, wanted=False), has_room=True) == "on next start"
    assert not serves(facts(state, wanted=False))


def test_weights_of_one_file_are_in_memory_once() -> None:
    assert need_bytes(OWN, PLAN, PLAN) == OWN


@pytest.mark.parametrize("change", [{"path": Path("/other.gguf")}, {"fingerprint": "1" * 32}])
def test_weights_of_another_file_are_added(change: dict[str, Any]) -> None:
    after = planned(model(**change))
    assert need_bytes(OWN, PLAN, after) == OWN + after.gguf.tensor_bytes


def test_a_longer_context_needs_more_and_a_shorter_one_less() -> None:
    longer = planned(None, **{"ctx-size": 32768})
    assert need_bytes(OWN, PLAN, longer) == longer.estimate.own_at_start_bytes > OWN
    assert need_bytes(OWN, PLAN, planned(None, **{"ctx-size": 8192})) < OWN


def test_the_successor_starts_with_an_empty_prompt_cache() -> None:
    assert need_bytes(PLAN.estimate.own_bytes, PLAN, PLAN) == OWN


def test_memory_beyond_the_estimate_is_expected_of_the_successor() -> None:
    assert need_bytes(PLAN.estimate.own_bytes + 7, PLAN, PLAN) == OWN + 7


@given(need=st.integers(0, 8 * GIB), available=st.integers(0, 8 * GIB))
def test_a_reserve_of_a_twentieth_is_left(need: int, available: int) -> None:
    here = machine(memory_available_bytes=available, memory_bytes=20 * GIB)
    assert (need <= usable_bytes(here)) == (available - need >= GIB)
