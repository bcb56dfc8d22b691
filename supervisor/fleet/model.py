"""One configured model, its replicas, and the instances that hold their places.

A replica is a place; an instance comes and goes. While settings change, a place can have three: one
that serves, one that is coming up to follow it, and some that finish what they hold. They differ
in name: `chat.0`, then `chat.0~2`, then `chat.0` again once that is free. Names of models have no
tilde, so these are nobody else's, and sockets and logs are named after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator

from proxy.prompt_cache.fingerprint import RestoredSlot, decode_fingerprint
from proxy.upstream.upstream import Upstream
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.fleet.launch_id import LaunchFingerprint, ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.instance.instance import Instance
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.process.launch import Launch
from supervisor.settings.schema import ResidencyPolicy
from supervisor.slot_store.manager import SlotManager


class Replica:
    """An instance in its place, and the settings it is made from.

    Attributes:
        place: Whose place it holds.
        name: The instance's name.
        planner: Makes its runs; another one from its next run on when settings change.
        plan: What its latest run was started with, or None before the first.
        fingerprint: What that was made from, or None before the first.
        instance: The instance; set by the fleet, which alone makes these.
        slots: Saves and restores its slots; set likewise.
        life: The task that serves it, while the fleet does.
    """

    instance: Instance
    slots: SlotManager

    def __init__(self, place: ReplicaId, name: str, planner: LaunchPlanner) -> None:
        self.place = place
        self.name = name
        self.planner = planner
        self.plan: Plan | None = None
        self.fingerprint: LaunchFingerprint | None = None
        self.life: asyncio.Task[None] | None = None

    def launch(self, _run: int) -> Launch:
        """Plan and launch a run; blocks for some milliseconds of file reading."""
        plan = self.planner.plan_at(self.place)
        self.fingerprint = self.planner.fingerprint(self.place.model, plan.engine)
        self.plan = plan
        return self.planner.launch(plan, self.name)

    def upstream(self, snapshot: InstanceSnapshot, aliases: tuple[str, ...]) -> Upstream:
        """Return the instance as the proxy knows it."""
        plan, endpoint = self.plan, snapshot.endpoint
        return Upstream(
            name=snapshot.name,
            model=snapshot.model,
            slots=plan.slots if plan else 1,
            socket=str(endpoint.socket) if endpoint.socket else None,
            host=endpoint.host,
            port=endpoint.port,
            api_key=snapshot.api_key,
            aliases=aliases,
            can_name_slots=plan is not None and plan.has_own_slots,
            tells_its_end=True,
        )

    def restored_slots(self, run: int) -> Iterator[RestoredSlot]:
        """Yield the slots as a run began with them, for the proxy's prefix index."""
        for one in self.slots.restored_slots(run):
            tokens = one.kept.tokens if one.kept else 0
            word = one.kept.fingerprint if one.kept else ""
            yield RestoredSlot(one.id_slot, one.task, tokens, decode_fingerprint(word))


class Model:
    """One configured model and its replicas.

    Attributes:
        entry: What the settings say of it.
        replicas: Those that serve, or shall when they are wanted, by number. Empty once the model
            is configured no more, and only what it still holds is being finished.
        coming: Those that come up to take the place of one of `replicas`.
        leaving: Those that finish what they hold.
        is_open: Whether a request brings it up; not after it was stopped by command.
        refusal: Why it could not be brought up the last time that it was asked for, or None.
    """

    def __init__(self, entry: ModelEntry, residency: ResidencyPolicy) -> None:
        self.entry = entry
        self.residency = residency
        self.is_open = True
        self.refusal: str | None = None
        self.replicas: tuple[Replica, ...] = ()
        self.coming: tuple[Replica, ...] = ()
        self.leaving: tuple[Replica, ...] = ()

    @property
    def is_configured(self) -> bool:
        """Return whether the settings still have it."""
        return bool(self.replicas)

    @property
    def all_replicas(self) -> tuple[Replica, ...]:
        """Return all that have, or may have, a process."""
        return (*self.replicas, *self.coming, *self.leaving)

    @property
    def plan(self) -> Plan | None:
        """Return what one of its replicas was last started with, or None before the first."""
        return next((one.plan for one in self.all_replicas if one.plan), None)

    @property
    def is_wanted(self) -> bool:
        """Return whether somebody asked for it to be up."""
        return any(one.instance.snapshot().wanted for one in self.replicas)

    def at(self, number: int) -> Replica:
        """Return the replica of a number."""
        return next(one for one in self.replicas if one.place.number == number)

    def set_replica(self, new: Replica) -> None:
        """Put a replica into its place; who held it is in none of the three lists any more."""
        others = [one for one in self.replicas if one.place != new.place]
        self.coming = tuple(one for one in self.coming if one is not new)
        self.replicas = tuple(sorted([*others, new], key=lambda one: one.place))

    def retire(self, replica: Replica) -> None:
        """Count a replica among those that leave."""
        self.replicas = tuple(one for one in self.replicas if one is not replica)
        self.coming = tuple(one for one in self.coming if one is not replica)
        self.leaving = (*self.leaving, replica)

    def forget(self, replica: Replica) -> None:
        """Drop a replica that has left."""
        self.leaving = tuple(one for one in self.leaving if one is not replica)


def name_for(place: ReplicaId, taken: Collection[str]) -> str:
    """Return the first name for an instance of a place that nobody has."""
    name, generation = str(place), 1
    while name in taken:
        generation += 1
        name = f"{place}~{generation}"
    return name
