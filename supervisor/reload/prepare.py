"""Finds everything about new settings that can be wrong, before anything is touched.

The sources are read again, what they say is compared with what runs, and every model of which a new
process will be made is planned. All of it blocks, and is done in a thread; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from supervisor.errors import CorralError
from supervisor.flags.plan import Plan
from supervisor.fleet.launch_id import LaunchFingerprint, ReplicaId
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.reload.diff import Difference, compare
from supervisor.settings.load import Loaded

# Raises CorralError where settings are wrong; what it returns takes them in.
ExtraCheck = Callable[[Loaded], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """New settings that passed every check.

    Attributes:
        loaded: The settings.
        planner: Makes what they say.
        plans: Of each model of which a new process will be made.
        difference: What they change.
        take_in: Takes in what they say of other things than models.
    """

    loaded: Loaded
    planner: LaunchPlanner
    plans: Mapping[str, Plan]
    difference: Difference
    take_in: Callable[[], None]


def prepare(
    replicas: Iterable[Replica],
    read: Callable[[], Loaded],
    make_planner: Callable[[Loaded], LaunchPlanner],
    beside: ExtraCheck,
) -> ReloadPlan:
    """Read, compare and plan.

    Args:
        replicas: Those that hold their places now.
        read: Reads the sources of the settings.
        make_planner: Makes a workshop of settings.
        beside: Finds what is wrong about all that is not a model.

    Raises:
        CorralError: The first thing that is wrong.
    """
    loaded = read()
    planner = make_planner(loaded)
    difference = compare(_running(replicas), _wanted(planner))
    plans = {
        model: planner.plan_at(ReplicaId(model, 0)) for model in sorted(difference.models_to_plan)
    }
    return ReloadPlan(loaded, planner, plans, difference, beside(loaded))


def _running(replicas: Iterable[Replica]) -> dict[ReplicaId, LaunchFingerprint | None]:
    """Return what each replica was made from."""
    return {one.place: one.fingerprint or _unused_fingerprint(one) for one in replicas}


def _unused_fingerprint(replica: Replica) -> LaunchFingerprint | None:
    """Return what a replica that never ran would have been made from; None where that failed."""
    try:
        return replica.planner.fingerprint(replica.place.model, replica.planner.engine())
    except CorralError:
        return None


def _wanted(planner: LaunchPlanner) -> dict[ReplicaId, LaunchFingerprint]:
    engine = planner.engine()
    return {
        ReplicaId(name, number): fingerprint
        for name in planner.entries
        for fingerprint in [planner.fingerprint(name, engine)]
        for number in range(planner.replicas(name).count)
    }
