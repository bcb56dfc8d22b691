"""The life of one instance, as a table that can be checked by eye. No I/O, no clock.

Two rules for this file:

1. It decides, it never does. `step` takes what an instance is and what happened, and returns what
   the instance is next. `instance.py` performs it.
2. A rule is a row. What a row cannot say is said by a second, smaller table beside it, never by
   an `if` on a particular state.

How to read it. Three kinds of event happen to an instance: the commands START, STOP and RESTART;
the passing of a state's DEADLINE; and facts about its process: HEALTHY, UNHEALTHY, OVERDUE, WARMED,
DRAINED and EXITED. `TRANSITIONS` says which state each leads to; an event without a row is ignored.

Beside the state stand three things:

- `wanted`: somebody asked for this instance to be up. Commands set it, facts never do.
- `run`: the number of the process, counted from 1. A fact carries the run it speaks of and is
  ignored when that run is over, so a late word about the last process never hurts the next one.
- `leaving`: why this run is being ended: because somebody ASKED, because its engine goes on
  computing for a client that left (OVERDUE, no fault), or because it is at fault (STALLED while
  loading, MUTE when it should answer). None while nobody ends it.

EXITED has no rows of its own. It is heard in every state that has a process, and where it leads
depends on how the run came to its end (`AFTER_EXIT`): a process nobody wants is STOPPED; one that
we asked to leave, and want, starts again; all else is a fault, which waits in BACKOFF for another
try, or is FAILED when the caller found it hopeless.

Before editing: `tests/laws/test_lifecycle.py` holds the laws, and every row has a test that fails
without it. The diagram in `supervisor/DESIGN.md` is drawn from `TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class State(StrEnum):
    """Where an instance is in its life; what each means stands in `STATES`."""

    STOPPED = "stopped"
    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    STOPPING = "stopping"
    KILLING = "killing"
    BACKOFF = "backoff"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to an instance: commands, facts about its process, and the deadline."""

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    OVERDUE = "overdue"
    WARMED = "warmed"
    DRAINED = "drained"
    EXITED = "exited"
    DEADLINE = "deadline"


class StopReason(StrEnum):
    """Why a run is being ended by us."""

    REQUESTED = "asked"
    OVERDUE = "overdue"
    LOAD_TIMEOUT = "stalled"
    UNRESPONSIVE = "mute"


class ExitOutcome(StrEnum):
    """How a run came to its end."""

    STOPPED = "unwanted"
    RESTART = "again"
    FAILURE = "fault"
    GIVE_UP = "hopeless"


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What is true of every instance in a state.

    Attributes:
        deadline: Name of the limit, in seconds, after which DEADLINE happens; None for none.
        meaning: The state in a few words, for people.
        process: Whether an engine may be running.
    """

    deadline: str | None
    meaning: str
    process: bool = True


STATES: Final[Mapping[State, StateInfo]] = MappingProxyType(
    {
        State.STOPPED: StateInfo(None, "down, and that is fine", process=False),
        State.STARTING: StateInfo("load_timeout_s", "loading the model"),
        State.WARMING: StateInfo("warm_timeout_s", "healthy, cache being filled"),
        State.READY: StateInfo(None, "serving"),
        State.UNHEALTHY: StateInfo("unhealthy_timeout_s", "up, not answering; given nothing"),
        State.DRAINING: StateInfo("drain_timeout_s", "finishing what it holds"),
        State.STOPPING: StateInfo("stop_timeout_s", "asked to leave"),
        State.KILLING: StateInfo("kill_timeout_s", "made to leave"),
        State.BACKOFF: StateInfo("backoff_s", "waiting to try again", process=False),
        State.FAILED: StateInfo(None, "given up; the cause says what to do", process=False),
    }
)

TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        State.STOPPED: {
            Event.START: State.STARTING,
            Event.RESTART: State.STARTING,
        },
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
        State.STOPPING: {
            Event.DEADLINE: State.KILLING,
        },
        State.KILLING: {
            Event.DEADLINE: State.KILLING,
        },
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
)

AFTER_EXIT: Final[Mapping[ExitOutcome, State]] = MappingProxyType(
    {
        ExitOutcome.STOPPED: State.STOPPED,
        ExitOutcome.RESTART: State.STARTING,
        ExitOutcome.FAILURE: State.BACKOFF,
        ExitOutcome.GIVE_UP: State.FAILED,
    }
)

# Rows that end a run for a fault of its own, which counts against the restart policy.
FAILURES: Final[Mapping[tuple[State, Event], StopReason]] = MappingProxyType(
    {
        (State.STARTING, Event.DEADLINE): StopReason.LOAD_TIMEOUT,
        (State.UNHEALTHY, Event.DEADLINE): StopReason.UNRESPONSIVE,
    }
)

# Rows that end a run which a client's request has made useless: no fault, the next run follows.
RENEWALS: Final[Mapping[tuple[State, Event], StopReason]] = MappingProxyType(
    {
        (State.READY, Event.OVERDUE): StopReason.OVERDUE,
        (State.UNHEALTHY, Event.OVERDUE): StopReason.OVERDUE,
    }
)

# Reasons to end a run after which an exit is no fault.
EXCUSED: Final = frozenset({StopReason.REQUESTED, StopReason.OVERDUE})

# Rows that hold only while nobody wants the instance: a drain that STOP began can be called off,
# one that RESTART began goes on.
ONLY_UNWANTED: Final = frozenset({(State.DRAINING, Event.START)})

# States in which a run is on its way out; in the others nobody is ending it.
ENDING: Final = frozenset({State.DRAINING, State.STOPPING, State.KILLING})

# What each command makes of `wanted`.
WANTED: Final[Mapping[Event, bool]] = MappingProxyType(
    {Event.START: True, Event.STOP: False, Event.RESTART: True}
)

# Commands that ask a running process to leave.
ASKING: Final = frozenset({Event.STOP, Event.RESTART})

# Events that speak of one run.
FACTS: Final = frozenset(
    {
        Event.HEALTHY,
        Event.UNHEALTHY,
        Event.OVERDUE,
        Event.WARMED,
        Event.DRAINED,
        Event.EXITED,
    }
)


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """One instance, as far as decisions go.

    Attributes:
        state: Where it is in its life.
        wanted: Whether it was asked to be up.
        run: Number of the latest process; 0 before the first.
        leaving: Why that process is being ended by us; None while it is not.
    """

    state: State = State.STOPPED
    wanted: bool = False
    run: int = 0
    leaving: StopReason | None = None

    @property
    def ending(self) -> ExitOutcome:
        """Return what an exit now would be, before anybody judged whether retrying can help."""
        if not self.wanted:
            return ExitOutcome.STOPPED
        return ExitOutcome.RESTART if self.leaving in EXCUSED else ExitOutcome.FAILURE


def step(
    life: Lifecycle, event: Event, *, run: int | None = None, hopeless: bool = False
) -> Lifecycle:
    """Return what an instance is after an event.

    Args:
        life: What it is now.
        event: What happened.
        run: For facts, the run they speak of; another run's facts are ignored.
        hopeless: For EXITED, whether a fault is beyond retrying: its cause is permanent or the
            breaker is open. Without meaning for an exit that is no fault.
    """
    if event in FACTS and run != life.run:
        return life
    if event is Event.EXITED:
        return _exited(life, hopeless=hopeless)
    return _follow(_hear(life, event), event, called_off=life.wanted)


def _hear(life: Lifecycle, command: Event) -> Lifecycle:
    """Take a command's wish, which counts even where it has no row."""
    life = replace(life, wanted=WANTED.get(command, life.wanted))
    if command in ASKING and STATES[life.state].process:
        return replace(life, leaving=StopReason.REQUESTED)
    return life


def _follow(life: Lifecycle, event: Event, *, called_off: bool) -> Lifecycle:
    row = (life.state, event)
    after = TRANSITIONS[life.state].get(event)
    if after is None or (row in ONLY_UNWANTED and called_off):
        return life
    leaving = FAILURES.get(row) or RENEWALS.get(row, life.leaving)
    return _enter(replace(life, leaving=leaving), after)


def _exited(life: Lifecycle, *, hopeless: bool) -> Lifecycle:
    if not STATES[life.state].process:
        return life
    ending = life.ending
    if ending is ExitOutcome.FAILURE and hopeless:
        ending = ExitOutcome.GIVE_UP
    return _enter(life, AFTER_EXIT[ending])


def _enter(life: Lifecycle, state: State) -> Lifecycle:
    """Enter a state; STARTING begins the next run, and a run that serves again is not leaving."""
    if state is State.STARTING:
        return Lifecycle(state, life.wanted, life.run + 1)
    return replace(life, state=state, leaving=life.leaving if state in ENDING else None)
