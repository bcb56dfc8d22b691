"""The laws of the state table, and the table itself, written a second time by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.instance import states
from supervisor.instance.health import HealthSettings
from supervisor.instance.limits import InstanceLimits
from supervisor.instance.states import (
    STATES,
    TRANSITIONS,
    Event,
    Lifecycle,
    State,
    StopReason,
    step,
)

# DESIGN.md, chapter 4. A dot is an empty cell; EXITED has a table of its own below.
TABLE = """
            START     STOP      RESTART   HEALTHY   UNHEALTHY OVERDUE   WARMED    DRAINED   DEADLINE
  STOPPED   STARTING  .         STARTING  .         .         .         .         .         .
  STARTING  .         STOPPING  STOPPING  WARMING   .         .         .         .         STOPPING
  WARMING   .         STOPPING  STOPPING  .         UNHEALTHY .         READY     .         READY
  READY     .         DRAINING  DRAINING  .         UNHEALTHY    DRAINING  .         .         .
  UNHEALTHY .         DRAINING  DRAINING  READY     .         DRAINING  .         .         STOPPING
  DRAINING  READY     .         .         .         .         .         .         STOPPING  STOPPING
  STOPPING  .         .         .         .         .         .         .         .         KILLING
  KILLING   .         .         .         .         .         .         .         .         KILLING
  BACKOFF   STARTING  STOPPED   STARTING  .         .         .         .         .         STARTING
  FAILED    STARTING  STOPPED   STARTING  .         .         .         .         .         .
"""


def cells() -> Iterable[tuple[State, Event, State | None]]:
    head, *rows = [line.split() for line in TABLE.strip().splitlines()]
    for name, *targets in rows:
        for event, target in zip(head, targets, strict=True):
            yield State[name], Event[event], None if target == "." else State[target]


COMMANDS = (Event.START, Event.STOP, Event.RESTART)
FACTS = (
    Event.HEALTHY,
    Event.UNHEALTHY,
    Event.OVERDUE,
    Event.WARMED,
    Event.DRAINED,
    Event.EXITED,
)
ALIVE = [state for state, about in STATES.items() if about.process]
HAPPENINGS = st.tuples(st.sampled_from(Event), st.booleans(), st.booleans())


def after(life: Lifecycle, *events: Event, hopeless: bool = False) -> Lifecycle:
    for event in events:
        life = step(life, event, run=life.run, hopeless=hopeless)
    return life


def unwanted(state: State) -> Lifecycle:
    """Return a life in a state that was reached by STOP."""
    return Lifecycle(state, wanted=False, run=3, leaving=StopReason.REQUESTED)


@st.composite
def lives(draw: st.DrawFn) -> Lifecycle:
    """Draw any life that events can lead to."""
    life = Lifecycle()
    for event, is_current, hopeless in draw(st.lists(HAPPENINGS, max_size=30)):
        life = step(life, event, run=life.run if is_current else life.run - 1, hopeless=hopeless)
    return life


@pytest.mark.parametrize(("state", "event", "target"), list(cells()))
def test_every_cell_of_the_table_holds(state: State, event: Event, target: State | None) -> None:
    assert step(unwanted(state), event, run=3).state is (target or state)


def test_the_table_has_no_row_beyond_the_design() -> None:
    rows = {(state, event) for state, row in TRANSITIONS.items() for event in row}
    assert rows == {(state, event) for state, event, target in cells() if target}


def test_every_state_is_reachable() -> None:
    found, todo = {Lifecycle()}, [Lifecycle()]
    while todo:
        life = todo.pop()
        for event in Event:
            for hopeless in (False, True):
                next_life = step(life, event, run=life.run, hopeless=hopeless)
                if next_life.run < 3 and next_life not in found:
                    found.add(next_life)
                    todo.append(next_life)
    assert {life.state for life in found} == set(State)


@pytest.mark.parametrize("state", State)
def test_every_state_but_three_has_a_deadline_that_leads_somewhere(state: State) -> None:
    rests = state in {State.STOPPED, State.READY, State.FAILED}
    assert (STATES[state].deadline is None) is rests
    assert (Event.DEADLINE not in TRANSITIONS[state]) is rests


def test_every_deadline_is_a_limit_or_the_policys_delay() -> None:
    named = {about.deadline for about in STATES.values()} - {None, "backoff_s"}
    assert named == {
        "kill_timeout_s",
        *(InstanceLimits.model_fields.keys() - HealthSettings.model_fields.keys()),
    }


@pytest.mark.parametrize("state", ALIVE)
def test_a_process_nobody_wants_leaves_a_stopped_instance(state: State) -> None:
    assert after(unwanted(state), Event.EXITED).state is State.STOPPED


@pytest.mark.parametrize("state", [State.DRAINING, State.STOPPING, State.KILLING])
def test_a_process_asked_to_leave_and_wanted_is_followed_by_the_next_run(state: State) -> None:
    life = Lifecycle(state, wanted=True, run=3, leaving=StopReason.REQUESTED)
    assert after(life, Event.EXITED) == Lifecycle(State.STARTING, wanted=True, run=4)


@pytest.mark.parametrize("state", ALIVE)
@pytest.mark.parametrize(("hopeless", "target"), [(False, State.BACKOFF), (True, State.FAILED)])
def test_a_wanted_process_that_leaves_unasked_is_a_fault(
    state: State, target: State, *, hopeless: bool
) -> None:
    life = Lifecycle(state, wanted=True, run=3)
    assert after(life, Event.EXITED, hopeless=hopeless) == Lifecycle(target, wanted=True, run=3)


@pytest.mark.parametrize("state", [s for s in State if not STATES[s].process])
def test_without_a_process_there_is_no_exit(state: State) -> None:
    life = Lifecycle(state, wanted=True, run=3)
    assert after(life, Event.EXITED) == life


@pytest.mark.parametrize(
    ("state", "leaving"),
    [(State.STARTING, StopReason.LOAD_TIMEOUT), (State.UNHEALTHY, StopReason.UNRESPONSIVE)],
)
def test_ending_a_run_for_its_own_fault_counts_as_one(state: State, leaving: StopReason) -> None:
    life = after(Lifecycle(state, wanted=True, run=3), Event.DEADLINE)
    assert life == Lifecycle(State.STOPPING, wanted=True, run=3, leaving=leaving)
    assert after(life, Event.DEADLINE, Event.EXITED).state is State.BACKOFF


def test_a_drain_that_outlasts_its_limit_is_no_fault() -> None:
    life = after(Lifecycle(State.READY, wanted=True, run=1), Event.RESTART, Event.DEADLINE)
    assert after(life, Event.EXITED).state is State.STARTING


@pytest.mark.parametrize("state", [State.READY, State.UNHEALTHY])
@pytest.mark.parametrize("deadlines", range(4))
def test_a_run_that_computes_for_a_client_that_left_is_followed_by_the_next_without_a_fault(
    state: State, deadlines: int
) -> None:
    life = after(Lifecycle(state, wanted=True, run=1), Event.OVERDUE, *[Event.DEADLINE] * deadlines)
    assert life.leaving is StopReason.OVERDUE
    assert after(life, Event.EXITED) == Lifecycle(State.STARTING, wanted=True, run=2)


def test_a_run_that_is_ended_for_a_fault_keeps_it_whatever_it_computes() -> None:
    mute = after(Lifecycle(State.UNHEALTHY, wanted=True, run=1), Event.DEADLINE, Event.OVERDUE)
    assert after(mute, Event.EXITED).state is State.BACKOFF


def test_stop_while_it_is_replaced_for_a_client_that_left_means_stop() -> None:
    life = after(Lifecycle(State.READY, wanted=True, run=1), Event.OVERDUE, Event.STOP)
    assert after(life, Event.EXITED).state is State.STOPPED


def test_what_has_to_be_killed_was_asked_all_the_same() -> None:
    life = after(Lifecycle(State.READY, wanted=True, run=1), Event.RESTART, *[Event.DEADLINE] * 3)
    assert life.state is State.KILLING
    assert after(life, Event.EXITED).state is State.STARTING


def test_start_calls_off_a_drain_that_stop_began() -> None:
    ready = Lifecycle(State.READY, wanted=True, run=1)
    assert after(ready, Event.STOP, Event.START) == ready


def test_start_does_not_call_off_a_drain_that_restart_began() -> None:
    draining = after(Lifecycle(State.READY, wanted=True, run=1), Event.RESTART)
    assert after(draining, Event.START) == draining


def test_a_drain_called_off_leaves_no_excuse_for_a_crash() -> None:
    life = after(Lifecycle(State.READY, wanted=True, run=1), Event.STOP, Event.START, Event.EXITED)
    assert life.state is State.BACKOFF


def test_start_while_it_is_being_stopped_means_again() -> None:
    life = after(
        Lifecycle(State.STARTING, wanted=True, run=1), Event.STOP, Event.START, Event.EXITED
    )
    assert life == Lifecycle(State.STARTING, wanted=True, run=2)


def test_stop_while_it_is_being_restarted_means_stop() -> None:
    life = after(
        Lifecycle(State.STARTING, wanted=True, run=1), Event.RESTART, Event.STOP, Event.EXITED
    )
    assert life.state is State.STOPPED


def test_restart_forgives_a_stalled_run_that_is_still_leaving() -> None:
    stalled = after(Lifecycle(State.STARTING, wanted=True, run=1), Event.DEADLINE)
    assert after(stalled, Event.RESTART, Event.EXITED).state is State.STARTING


@pytest.mark.parametrize("fact", FACTS)
@pytest.mark.parametrize("state", State)
def test_a_fact_about_the_last_run_is_ignored_in_every_state(state: State, fact: Event) -> None:
    life = Lifecycle(state, wanted=True, run=3)
    assert step(life, fact, run=2) == life


@given(lives(), st.sampled_from(FACTS), st.integers(-3, 3).filter(bool))
def test_a_fact_about_another_run_is_ignored(life: Lifecycle, fact: Event, off: int) -> None:
    assert step(life, fact, run=life.run + off) == life


@given(lives(), st.sampled_from(Event), st.booleans())
def test_only_commands_change_what_is_wanted(
    life: Lifecycle,
    event: Event,
    hopeless: bool,  # noqa: FBT001 (Hypothesis passes by position)
) -> None:
    then = step(life, event, run=life.run, hopeless=hopeless)
    if event not in COMMANDS:
        assert then.wanted is life.wanted
    else:
        assert then.wanted is (event is not Event.STOP)


@given(lives(), st.lists(HAPPENINGS, max_size=20))
def test_after_stop_nothing_is_admitted_and_nothing_is_started(
    life: Lifecycle, happenings: list[tuple[Event, bool, bool]]
) -> None:
    life = after(life, Event.STOP)
    runs = life.run
    for event, is_current, hopeless in happenings:
        if event not in {Event.START, Event.RESTART}:
            run = runs if is_current else runs - 1
            life = step(life, event, run=run, hopeless=hopeless)
            assert life.state not in {State.STARTING, State.WARMING, State.READY}
            assert life.run == runs


@given(lives(), st.lists(st.sampled_from([Event.DRAINED, Event.HEALTHY, Event.WARMED])))
def test_stop_always_ends_in_stopped(life: Lifecycle, noise: list[Event]) -> None:
    life = after(life, Event.STOP, *noise)
    for _ in range(3):
        life = after(life, Event.DEADLINE)
    assert life.state in {State.KILLING, State.STOPPED}
    assert after(life, Event.EXITED).state is State.STOPPED


@given(lives(), st.sampled_from(Event), st.booleans())
def test_a_run_begins_only_when_the_last_is_over(
    life: Lifecycle,
    event: Event,
    hopeless: bool,  # noqa: FBT001 (Hypothesis passes by position)
) -> None:
    then = step(life, event, run=life.run, hopeless=hopeless)
    if then.run != life.run:
        assert then == Lifecycle(State.STARTING, wanted=True, run=life.run + 1)
        assert event is Event.EXITED or not STATES[life.state].process


@given(lives(), st.sampled_from(Event))
def test_the_sick_serve_again_only_when_they_are_well(life: Lifecycle, event: Event) -> None:
    if life.state is State.UNHEALTHY and after(life, event).state is State.READY:
        assert event is Event.HEALTHY


@given(lives())
def test_a_run_is_being_ended_only_in_the_states_of_ending(life: Lifecycle) -> None:
    assert (life.leaving is not None) is (life.state in states.ENDING)


@given(lives())
def test_what_is_stopped_is_unwanted_and_what_serves_is_wanted(life: Lifecycle) -> None:
    if life.state is State.STOPPED:
        assert not life.wanted
    if life.state not in {State.STOPPED, *states.ENDING}:
        assert life.wanted
