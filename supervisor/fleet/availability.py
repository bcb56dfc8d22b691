"""The state of a model, for admission and for clients."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

from supervisor.fleet.model import Model
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State

Availability = Literal["loaded", "loading", "unloaded", "failed"]

_LOADING: Final = frozenset({State.STARTING, State.WARMING, State.BACKOFF})
_LOADED: Final = frozenset({State.READY, State.UNHEALTHY})
_UNLOADING: Final = frozenset({State.DRAINING, State.STOPPING, State.KILLING})


class Phase(Enum):
    """Where a model is between unloaded and loaded."""

    DOWN = auto()
    LOADING = auto()
    LOADED = auto()
    UNLOADING = auto()
    FAILED = auto()  # a start would fail again


def snapshots_of(model: Model) -> list[InstanceSnapshot]:
    return [replica.instance.snapshot() for replica in model.replicas]


def phase_of(model: Model, snapshots: Sequence[InstanceSnapshot]) -> Phase:
    states = {one.state for one in snapshots}
    if states & _LOADED:
        return Phase.LOADED
    if states & _LOADING:
        return Phase.LOADING
    if states & _UNLOADING:
        return Phase.UNLOADING
    return Phase.FAILED if State.FAILED in states or not model.is_open else Phase.DOWN


def availability(model: Model) -> tuple[Availability, str | None]:
    """Return whether a model serves, and why it failed, or failed before its present load."""
    snapshots = [one.instance.snapshot() for one in (*model.replicas, *model.replacements)]
    if any(one.state is State.READY for one in snapshots):
        return "loaded", None
    if any(one.wanted and one.state is not State.FAILED for one in snapshots):
        return "loading", next((one.cause.sentence for one in snapshots if one.cause), None)
    causes = [one.cause.sentence for one in snapshots if one.cause and one.state is State.FAILED]
    if causes or model.refusal:
        return "failed", causes[0] if causes else model.refusal
    if model.is_open:
        return "unloaded", None
    return "failed", f"it is stopped (corral start {model.entry.name})"
