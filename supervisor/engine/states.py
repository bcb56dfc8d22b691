"""The lifecycle of one instance as a state table, and the public view of an instance.

No I/O, no clock. `step` takes a lifecycle and an event and returns the next lifecycle;
`instance.py` acts on it. A rule is a row of a table here, never an `if` on a particular state.

Each row has a test that fails without it (`scripts/mutate_table`). `scripts/docs --write` draws the
diagram in `supervisor/DESIGN.md` from these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

from supervisor.engine.client import Endpoint
from supervisor.engine.exit_cause import FailureCause
from supervisor.settings.tables import InstanceLimits


class State(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"  # loading the model
    WARMING = "warming"  # healthy; slots and prompts are being restored
    READY = "ready"
    UNHEALTHY = "unhealthy"  # running but not answering; gets no requests
    DRAINING = "draining"  # finishing its requests
    STOPPING = "stopping"  # exit requested
    KILLING = "killing"
    BACKOFF = "backoff"  # waiting for the next start
    FAILED = "failed"  # given up; the failure's cause says how to fix it


class Event(StrEnum):
    START = "start"
    STOP = "stop"
    RESTART = "restart"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    OVERDUE = "overdue"
    WARMED = "warmed"
    MEASURED = "measured"  # the next run gets other thread counts
    DRAINED = "drained"
    EXITED = "exited"
    DEADLINE = "deadline"


# `overdue`: it computes for a client that disconnected, or has lost a worker.
StopReason = Literal["requested", "measured", "overdue", "load_timeout", "unresponsive"]
ExitOutcome = Literal["not wanted", "restart", "failure", "give up"]


# Returns a time limit by the settings and the delay of the restart policy.
Deadline = Callable[[InstanceLimits, float], float]


# A state without a row may last.
DEADLINES: Final[Mapping[State, Deadline]] = {
    State.STARTING: lambda limits, _: limits.load_timeout_s,
    State.WARMING: lambda limits, _: limits.warm_timeout_s,
    State.UNHEALTHY: lambda limits, _: limits.unhealthy_timeout_s,
    State.DRAINING: lambda limits, _: limits.drain_timeout_s,
    State.STOPPING: lambda limits, _: limits.stop_timeout_s,
    State.KILLING: lambda limits, _: limits.kill_timeout_s,
    State.BACKOFF: lambda _, backoff_s: backoff_s,
}
# In all other states an engine may be running.
WITHOUT_PROCESS: Final = frozenset({State.STOPPED, State.BACKOFF, State.FAILED})

# The next state after a command, a deadline or a fact; an event without a row is ignored. EXITED
# has no rows: it counts in every state that has a process, and AFTER_EXIT has the next state.
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.STOPPED: {Event.START: State.STARTING, Event.RESTART: State.STARTING},
    State.STARTING: {
        Event.STOP: State.STOPPING,
        Event.RESTART: State.STOPPING,
        Event.HEALTHY: State.WARMING,
        Event.DEADLINE: State.STOPPING,
    },
    State.WARMING: {
        Event.STOP: State.STOPPING,
        Event.RESTART: State.STOPPING,
        Event.UNHEALTHY: State.UNHEALTHY,
        Event.WARMED: State.READY,
        Event.MEASURED: State.STOPPING,
        Event.DEADLINE: State.READY,
    },
    State.READY: {
        Event.STOP: State.DRAINING,
        Event.RESTART: State.DRAINING,
        Event.UNHEALTHY: State.UNHEALTHY,
        Event.OVERDUE: State.DRAINING,
    },
    State.UNHEALTHY: {
        Event.STOP: State.DRAINING,
        Event.RESTART: State.DRAINING,
        Event.HEALTHY: State.READY,
        Event.OVERDUE: State.DRAINING,
        Event.DEADLINE: State.STOPPING,
    },
    State.DRAINING: {
        Event.START: State.READY,
        Event.DRAINED: State.STOPPING,
        Event.DEADLINE: State.STOPPING,
    },
    State.STOPPING: {Event.DEADLINE: State.KILLING},
    State.KILLING: {Event.DEADLINE: State.KILLING},
    State.BACKOFF: {
        Event.START: State.STARTING,
        Event.STOP: State.STOPPED,
        Event.RESTART: State.STARTING,
        Event.DEADLINE: State.STARTING,
    },
    State.FAILED: {
        Event.START: State.STARTING,
        Event.STOP: State.STOPPED,
        Event.RESTART: State.STARTING,
    },
}

AFTER_EXIT: Final[Mapping[ExitOutcome, State]] = {
    "not wanted": State.STOPPED,
    "restart": State.STARTING,
    "failure": State.BACKOFF,
    "give up": State.FAILED,
}

# Rows by which the supervisor itself decides to end a run.
STOP_REASONS: Final[Mapping[tuple[State, Event], StopReason]] = {
    (State.STARTING, Event.DEADLINE): "load_timeout",
    (State.WARMING, Event.MEASURED): "measured",
    (State.READY, Event.OVERDUE): "overdue",
    (State.UNHEALTHY, Event.OVERDUE): "overdue",
    (State.UNHEALTHY, Event.DEADLINE): "unresponsive",
}

# Reasons to stop that do not count against the restart policy: the next run follows at once.
NOT_FAILURES: Final = frozenset({"requested", "measured", "overdue"})

# Rows that apply only while the instance is not wanted: START cancels a drain that STOP began, but
# not a drain that RESTART began.
ONLY_IF_UNWANTED: Final = frozenset({(State.DRAINING, Event.START)})

# In these states the supervisor is ending the run; in all others `stop_reason` is None.
EXITING: Final = frozenset({State.DRAINING, State.STOPPING, State.KILLING})

# Commands set `wanted`, facts never do.
WANTED: Final[Mapping[Event, bool]] = {Event.START: True, Event.STOP: False, Event.RESTART: True}

# Commands that ask a running process to exit.
STOP_COMMANDS: Final = frozenset({Event.STOP, Event.RESTART})

# Events about the process of one run. A fact about an earlier run is ignored, so that a late one
# does not affect the next process.
FACTS: Final = frozenset(
    {
        Event.HEALTHY,
        Event.UNHEALTHY,
        Event.OVERDUE,
        Event.WARMED,
        Event.MEASURED,
        Event.DRAINED,
        Event.EXITED,
    }
)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The state of an instance, and all else that `step` decides on."""

    state: State = State.STOPPED
    wanted: bool = False  # whether the last command was to run it
    run: int = 0  # the number of its latest process, from 1
    stop_reason: StopReason | None = None  # why the supervisor is ending that process

    @property
    def exit_outcome(self) -> ExitOutcome:
        """The meaning of an exit now, if another start may help."""
        if not self.wanted:
            return "not wanted"
        return "restart" if self.stop_reason in NOT_FAILURES else "failure"


def step(
    lifecycle: Lifecycle, event: Event, *, run: int | None = None, give_up: bool = False
) -> Lifecycle:
    """Return the lifecycle after an event; `run` is the run that a fact is about.

    With `give_up`, an EXITED that is a failure is not followed by another start.
    """
    if event in FACTS and run != lifecycle.run:
        return lifecycle
    if event is Event.EXITED:
        return _after_exit(lifecycle, give_up=give_up)
    # These apply even in a state that has no row for the command.
    commanded = replace(lifecycle, wanted=WANTED.get(event, lifecycle.wanted))
    if event in STOP_COMMANDS and lifecycle.state not in WITHOUT_PROCESS:
        commanded = replace(commanded, stop_reason="requested")
    return _transition(commanded, event, was_wanted=lifecycle.wanted)


def _transition(lifecycle: Lifecycle, event: Event, *, was_wanted: bool) -> Lifecycle:
    row = (lifecycle.state, event)
    state = TRANSITIONS[lifecycle.state].get(event)
    if state is None or (row in ONLY_IF_UNWANTED and was_wanted):
        return lifecycle
    stop_reason = STOP_REASONS.get(row, lifecycle.stop_reason)
    return _enter(replace(lifecycle, stop_reason=stop_reason), state)


def _after_exit(lifecycle: Lifecycle, *, give_up: bool) -> Lifecycle:
    if lifecycle.state in WITHOUT_PROCESS:
        return lifecycle
    outcome = lifecycle.exit_outcome
    if outcome == "failure" and give_up:
        outcome = "give up"
    return _enter(lifecycle, AFTER_EXIT[outcome])


def _enter(lifecycle: Lifecycle, state: State) -> Lifecycle:
    if state is State.STARTING:
        return Lifecycle(state, lifecycle.wanted, lifecycle.run + 1)
    stop_reason = lifecycle.stop_reason if state in EXITING else None
    return replace(lifecycle, state=state, stop_reason=stop_reason)


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    name: str  # such as chat.0
    model: str
    state: State
    wanted: bool  # whether the last command was to run it
    run: int  # the number of its latest process, from 1; 0 before the first
    pid: int | None
    since_s: float  # the monotonic time at which it entered its state
    up_s: float  # since it became ready; 0 while it is not up
    restarts: int  # runs after the first that were neither started by command nor measured
    failures: int  # the decaying count of the restart policy
    retry_in_s: float | None  # until the next start; None unless in BACKOFF
    cause: FailureCause | None  # the latest failure; None once it serves again
    warnings: tuple[FailureCause, ...]  # known once it is ready
    load_progress: float | None  # 0 to 1; None if the build does not report it
    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path | None
