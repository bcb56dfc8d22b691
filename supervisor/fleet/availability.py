"""Whether a model is there: for whoever moves it in and out of memory, and for who asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

from supervisor.fleet.model import Model
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State

Availability = Literal["loaded", "loading", "unloaded", "failed"]

_COMING: Final = frozenset({State.STARTING, State.WARMING, State.BACKOFF})
_UP: Final = frozenset({State.READY, State.UNHEALTHY})
_GOING: Final = frozenset({State.DRAINING, State.STOPPING, State.KILLING})


class Phase(Enum):
    """Where a model is on its way in and out of memory."""

    DOWN = auto()
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()
    """Down, and a start would not help: somebody must act."""


def facts_of(model: Model) -> list[InstanceSnapshot]:
    """Return the facts of the instances that hold a model's places."""
    return [replica.instance.snapshot() for replica in model.replicas]


def phase_of(model: Model, facts: Sequence[InstanceSnapshot]) -> Phase:
    """Return where a model is on its way in and out of memory.

    Args:
        model: The model.
        facts: Those of its instances.
    """
    states = {one.state for one in facts}
    if states & _UP:
        return Phase.LOADED
    if states & _COMING:
        return Phase.LOADING
    if states & _GOING:
        return Phase.UNLOADING
    return Phase.FAILED if State.FAILED in states or not model.is_open else Phase.DOWN


def availability(model: Model) -> tuple[Availability, str | None]:
    """Return whether a model can answer, and if it cannot until somebody acts, why."""
    facts = [one.instance.snapshot() for one in (*model.replicas, *model.coming)]
    if any(one.state is State.READY for one in facts):
        return "loaded", None
    if any(one.wanted and one.state is not State.FAILED for one in facts):
        return "loading", None
    causes = [one.cause.sentence for one in facts if one.cause and one.state is State.FAILED]
    if causes or model.refusal:
        return "failed", causes[0] if causes else model.refusal
    if model.is_open:
        return "unloaded", None
    return "failed", f"it is stopped (corral start {model.entry.name})"
