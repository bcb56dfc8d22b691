"""Laws of the state table, over all states and events. None repeats the table."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.engine.states import (
    DEADLINES,
    TRANSITIONS,
    WITHOUT_PROCESS,
    Event,
    Lifecycle,
    State,
    StopReason,
    step,
)
from supervisor.settings.tables import HealthSettings, InstanceLimits

COMMANDS = (Event.START, Event.STOP, Event.RESTART)
FACTS = [event for event in Event if event not in {*COMMANDS, Event.DEADLINE}]
ALIVE = [state for state in State if state not in WITHOUT_PROCESS]
DEAD = [state for state in State if state not in ALIVE]
IN_SERVICE = [State.READY, State.UNHEALTHY]
EXITING = [State.DRAINING, State.STOPPING, State.KILLING]
HAPPENINGS = st.tuples(st.sampled_from(Event), st.booleans(), st.booleans())
READY = Lifecycle(State.READY, wanted=True, run=1)


def after(lifecycle: Lifecycle, *events: Event, give_up: bool = False) -> Lifecycle:
    for event in events:
        lifecycle = step(lifecycle, event, run=lifecycle.run, give_up=give_up)
    return lifecycle


def wanted(state: State) -> Lifecycle:
    """Return a lifecycle as it is in a state that was reached without a command to stop."""
    return Lifecycle(state, wanted=state is not State.STOPPED, run=3)


def neighbours(lifecycle: Lifecycle) -> Iterable[Lifecycle]:
    for event in Event:
        for give_up in (False, True):
            # The number of the run makes no difference, and would make the search endless.
            then = after(lifecycle, event, give_up=give_up)
            yield Lifecycle(then.state, then.wanted, 1, then.stop_reason)


def reachable(start: Lifecycle) -> set[Lifecycle]:
    found, todo = {start}, [start]
    while todo:
        for then in neighbours(todo.pop()):
            if then not in found:
                found.add(then)
                todo.append(then)
    return found


@st.composite
def lifecycles(draw: st.DrawFn) -> Lifecycle:
    """Draw any lifecycle that events can lead to."""
    found = Lifecycle()
    for event, is_current, give_up in draw(st.lists(HAPPENINGS, max_size=30)):
        found = step(found, event, run=found.run - (not is_current), give_up=give_up)
    return found


# Reachability.


def test_every_state_is_reachable() -> None:
    assert {found.state for found in reachable(Lifecycle())} == set(State)


def test_every_state_is_reachable_from_every_other() -> None:
    everything = reachable(Lifecycle(run=1))
    assert all(reachable(found) == everything for found in everything)


@pytest.mark.parametrize("state", State)
def test_a_state_has_a_deadline_if_and_only_if_its_passing_leads_somewhere(state: State) -> None:
    assert (state in DEADLINES) is (Event.DEADLINE in TRANSITIONS[state])


@pytest.mark.parametrize("state", State)
def test_only_states_that_may_last_have_no_deadline(state: State) -> None:
    may_last = state in {State.STOPPED, State.READY, State.FAILED}
    assert (state not in DEADLINES) is may_last


def test_every_deadline_is_a_limit_or_the_delay_of_the_restart_policy() -> None:
    names = InstanceLimits.model_fields.keys() - HealthSettings.model_fields.keys()
    values = {name: float(number) for number, name in enumerate(sorted({"kill_timeout_s", *names}))}
    limits = cast("InstanceLimits", SimpleNamespace(**values))
    found = {deadline(limits, -1.0) for deadline in DEADLINES.values()}
    assert found == {-1.0, *values.values()}


# The life of a process that works.


def test_a_start_loads_warms_and_serves() -> None:
    story = [after(Lifecycle(), Event.START)]
    for fact in (Event.HEALTHY, Event.WARMED):
        story.append(after(story[-1], fact))
    assert [found.state for found in story] == [State.STARTING, State.WARMING, State.READY]


def test_a_warm_up_beyond_its_limit_serves_all_the_same() -> None:
    assert after(wanted(State.WARMING), Event.DEADLINE).state is State.READY


@pytest.mark.parametrize("state", [State.WARMING, State.READY])
def test_an_unhealthy_engine_serves_again_when_it_is_healthy(state: State) -> None:
    unhealthy = after(wanted(state), Event.UNHEALTHY)
    assert unhealthy.state is State.UNHEALTHY
    assert after(unhealthy, Event.HEALTHY).state is State.READY


@given(lifecycles(), st.sampled_from(Event))
def test_an_unhealthy_engine_serves_only_when_it_is_healthy(
    lifecycle: Lifecycle, event: Event
) -> None:
    if lifecycle.state is State.UNHEALTHY and after(lifecycle, event).state is State.READY:
        assert event is Event.HEALTHY


# Commands.


@pytest.mark.parametrize("command", [Event.START, Event.RESTART])
@pytest.mark.parametrize("state", DEAD)
def test_without_a_process_a_start_begins_the_next_run(state: State, command: Event) -> None:
    assert after(wanted(state), command) == Lifecycle(State.STARTING, wanted=True, run=4)


@pytest.mark.parametrize("state", DEAD)
def test_without_a_process_a_stop_takes_no_time(state: State) -> None:
    assert after(wanted(state), Event.STOP) == Lifecycle(State.STOPPED, wanted=False, run=3)


@pytest.mark.parametrize("command", [Event.STOP, Event.RESTART])
@pytest.mark.parametrize("state", [state for state in ALIVE if state not in EXITING])
def test_only_an_engine_that_was_in_service_drains(state: State, command: Event) -> None:
    found = after(wanted(state), command)
    assert found.state is (State.DRAINING if state in IN_SERVICE else State.STOPPING)
    assert found.stop_reason == "requested"


@pytest.mark.parametrize("state", ALIVE)
def test_an_exit_after_stop_stops_the_instance(state: State) -> None:
    assert after(wanted(state), Event.STOP, Event.EXITED).state is State.STOPPED


@pytest.mark.parametrize("state", ALIVE)
def test_an_exit_after_restart_begins_the_next_run(state: State) -> None:
    found = after(wanted(state), Event.RESTART, Event.EXITED)
    assert found == Lifecycle(State.STARTING, wanted=True, run=4)


@pytest.mark.parametrize("deadlines", range(4))
def test_the_last_command_counts_however_long_the_exit_takes(deadlines: int) -> None:
    slow = [Event.DEADLINE] * deadlines
    restarted = after(READY, Event.RESTART, *slow, Event.EXITED)
    assert restarted == Lifecycle(State.STARTING, wanted=True, run=2)
    assert after(READY, Event.RESTART, *slow, Event.STOP, Event.EXITED).state is State.STOPPED
    if deadlines:  # else the drain is cancelled
        assert after(READY, Event.STOP, *slow, Event.START, Event.EXITED) == restarted


def test_an_exit_that_takes_too_long_is_enforced_step_by_step() -> None:
    story = [after(READY, Event.STOP)]
    for _ in range(3):
        story.append(after(story[-1], Event.DEADLINE))
    assert [found.state for found in story] == [*EXITING, State.KILLING]
    assert after(story[0], Event.DRAINED) == story[1]


def test_start_cancels_a_drain_that_stop_began() -> None:
    assert after(READY, Event.STOP, Event.START) == READY


def test_start_does_not_cancel_a_drain_that_restart_began() -> None:
    draining = after(READY, Event.RESTART)
    assert after(draining, Event.START) == draining


def test_a_crash_after_a_cancelled_drain_is_a_failure() -> None:
    assert after(READY, Event.STOP, Event.START, Event.EXITED).state is State.BACKOFF


@given(lifecycles(), st.sampled_from(Event), st.booleans())
def test_only_commands_change_whether_it_is_wanted(
    lifecycle: Lifecycle,
    event: Event,
    give_up: bool,  # noqa: FBT001 (Hypothesis passes by position)
) -> None:
    then = after(lifecycle, event, give_up=give_up)
    assert then.wanted is (event is not Event.STOP if event in COMMANDS else lifecycle.wanted)


@given(lifecycles(), st.lists(HAPPENINGS, max_size=20))
def test_after_stop_nothing_serves_or_starts(
    lifecycle: Lifecycle, happenings: list[tuple[Event, bool, bool]]
) -> None:
    lifecycle = after(lifecycle, Event.STOP)
    run = lifecycle.run
    for event, is_current, give_up in happenings:
        if event not in {Event.START, Event.RESTART}:
            lifecycle = step(lifecycle, event, run=run - (not is_current), give_up=give_up)
            assert lifecycle.state not in {State.STARTING, State.WARMING, State.READY}
            assert lifecycle.run == run


@given(lifecycles(), st.lists(st.sampled_from([Event.DRAINED, Event.HEALTHY, Event.WARMED])))
def test_stop_always_ends_in_stopped(lifecycle: Lifecycle, noise: list[Event]) -> None:
    slow = [Event.DEADLINE] * 3
    lifecycle = after(lifecycle, Event.STOP, *noise, *slow)
    assert lifecycle.state in {State.KILLING, State.STOPPED}
    assert after(lifecycle, Event.EXITED).state is State.STOPPED


# Failures.


@pytest.mark.parametrize("state", [state for state in ALIVE if state not in EXITING])
@pytest.mark.parametrize(("give_up", "target"), [(False, State.BACKOFF), (True, State.FAILED)])
def test_an_exit_that_nothing_requested_is_a_failure(
    state: State, target: State, *, give_up: bool
) -> None:
    found = after(wanted(state), Event.EXITED, give_up=give_up)
    assert found == Lifecycle(target, wanted=True, run=3)


def test_the_next_run_begins_after_the_backoff() -> None:
    found = after(wanted(State.BACKOFF), Event.DEADLINE)
    assert found == Lifecycle(State.STARTING, wanted=True, run=4)


@pytest.mark.parametrize("state", DEAD)
def test_without_a_process_nothing_exits(state: State) -> None:
    assert after(wanted(state), Event.EXITED) == wanted(state)


@pytest.mark.parametrize(
    ("state", "reason"),
    [(State.STARTING, "load_timeout"), (State.UNHEALTHY, "unresponsive")],
)
@pytest.mark.parametrize("give_up", [False, True])
def test_an_engine_that_does_not_answer_is_stopped_as_a_failure(
    state: State, reason: StopReason, *, give_up: bool
) -> None:
    found = after(wanted(state), Event.DEADLINE)
    assert found == Lifecycle(State.STOPPING, wanted=True, run=3, stop_reason=reason)
    target = State.FAILED if give_up else State.BACKOFF
    assert after(found, Event.DEADLINE, Event.EXITED, give_up=give_up).state is target
    assert after(found, Event.OVERDUE, Event.EXITED, give_up=give_up).state is target
    assert after(found, Event.RESTART, Event.EXITED, give_up=give_up).state is State.STARTING


@pytest.mark.parametrize("state", IN_SERVICE)
@pytest.mark.parametrize("deadlines", range(4))
def test_an_overdue_run_is_replaced_without_a_failure(state: State, deadlines: int) -> None:
    found = after(wanted(state), Event.OVERDUE)
    assert found.state is State.DRAINING
    found = after(found, *[Event.DEADLINE] * deadlines)
    assert found.stop_reason == "overdue"
    assert after(found, Event.EXITED) == Lifecycle(State.STARTING, wanted=True, run=4)
    assert after(found, Event.STOP, Event.EXITED).state is State.STOPPED


@pytest.mark.parametrize("deadlines", range(4))
def test_a_measured_run_is_followed_by_the_next_without_a_failure(deadlines: int) -> None:
    found = after(wanted(State.WARMING), Event.MEASURED)
    assert found.state is State.STOPPING
    found = after(found, *[Event.DEADLINE] * deadlines)
    assert found.stop_reason == "measured"
    assert after(found, Event.EXITED) == Lifecycle(State.STARTING, wanted=True, run=4)
    assert after(found, Event.STOP, Event.EXITED).state is State.STOPPED


# Runs.


@given(lifecycles(), st.sampled_from(FACTS), st.integers(-3, 3).filter(bool))
def test_a_fact_about_another_run_is_ignored(lifecycle: Lifecycle, fact: Event, off: int) -> None:
    assert step(lifecycle, fact, run=lifecycle.run + off) == lifecycle


@pytest.mark.parametrize("fact", FACTS)
def test_every_fact_about_the_current_run_counts_somewhere(fact: Event) -> None:
    lives = [wanted(state) for state in State]
    assert any(after(found, fact) != found for found in lives)
    assert all(step(found, fact, run=2) == found for found in lives)


@given(lifecycles(), st.sampled_from(Event), st.booleans())
def test_a_run_begins_only_when_the_last_has_exited(
    lifecycle: Lifecycle,
    event: Event,
    give_up: bool,  # noqa: FBT001 (Hypothesis passes by position)
) -> None:
    then = after(lifecycle, event, give_up=give_up)
    if then.run != lifecycle.run:
        assert then == Lifecycle(State.STARTING, wanted=True, run=lifecycle.run + 1)
        assert event is Event.EXITED or lifecycle.state in DEAD


@given(lifecycles())
def test_stopping_instances_have_a_reason_and_running_ones_are_wanted(lifecycle: Lifecycle) -> None:
    assert (lifecycle.stop_reason is not None) is (lifecycle.state in EXITING)
    if lifecycle.state is State.STOPPED:
        assert not lifecycle.wanted
    elif lifecycle.state not in EXITING:
        assert lifecycle.wanted
