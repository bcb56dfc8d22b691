"""Finds everything about new settings that can be wrong, before anything is touched.

The sources are read again, what they say is compared with what runs, and every model of which a new
process will be made is planned. All of it blocks, and is done in a thread; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from supervisor.errors import CorralError
from supervisor.fleet.difference import Difference, Place, Recipe, compare
from supervisor.fleet.replica import Replica
from supervisor.fleet.workshop import Workshop
from supervisor.profile.plan import Plan
from supervisor.settings.load import Loaded

# Raises CorralError where settings are wrong; what it returns takes them in.
Beside = Callable[[Loaded], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """New settings that passed every check.

    Attributes:
        loaded: The settings.
        workshop: Makes what they say.
        plans: Of each model of which a new process will be made.
        difference: What they change.
        take_in: Takes in what they say of other things than models.
    """

    loaded: Loaded
    workshop: Workshop
    plans: Mapping[str, Plan]
    difference: Difference
    take_in: Callable[[], None]


def prepare(
    replicas: Iterable[Replica],
    read: Callable[[], Loaded],
    make_workshop: Callable[[Loaded], Workshop],
    beside: Beside,
) -> Prepared:
    """Read, compare and plan.

    Args:
        replicas: Those that hold their places now.
        read: Reads the sources of the settings.
        make_workshop: Makes a workshop of settings.
        beside: Finds what is wrong about all that is not a model.

    Raises:
        CorralError: The first thing that is wrong.
    """
    loaded = read()
    workshop = make_workshop(loaded)
    difference = compare(_running(replicas), _wanted(workshop))
    plans = {
        model: workshop.plan_at(Place(model, 0)) for model in sorted(difference.models_to_plan)
    }
    return Prepared(loaded, workshop, plans, difference, beside(loaded))


def _running(replicas: Iterable[Replica]) -> dict[Place, Recipe | None]:
    """Return what each replica was made from."""
    return {one.place: one.recipe or _unused_recipe(one) for one in replicas}


def _unused_recipe(replica: Replica) -> Recipe | None:
    """Return what a replica that never ran would have been made from; None where that failed."""
    try:
        return replica.workshop.recipe(replica.place.model, replica.workshop.engine())
    except CorralError:
        return None


def _wanted(workshop: Workshop) -> dict[Place, Recipe]:
    engine = workshop.engine()
    return {
        Place(name, number): recipe
        for name in workshop.entries
        for recipe in [workshop.recipe(name, engine)]
        for number in range(workshop.replicas(name).count)
    }
