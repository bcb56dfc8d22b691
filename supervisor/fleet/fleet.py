"""Many instances, by the names of their models.

The fleet turns a word about models (start, stop, restart) into words about instances, and knows
when that is over. It decides nothing about one instance: `instance/states.py` does. Instances come
and go while it serves; `reload/` decides when and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

from proxy.failures import FAILURES, persist
from proxy.prompt_cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.upstream.slots import SlotState
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream
from supervisor.errors import DaemonBusy, NoSuchModel, SettingsInvalid
from supervisor.events import Emit
from supervisor.fleet import cache_commands
from supervisor.fleet.launch_id import ReplicaId
from supervisor.fleet.model import Model, Replica, name_for
from supervisor.fleet.planner import LaunchPlanner
from supervisor.instance.instance import Instance
from supervisor.instance.interfaces import Traffic
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.slot_store.manager import SlotManager

# A start is over when the instance serves, or when whoever waits should hear why it does not:
# in BACKOFF it will be tried again, but the cause of the first failure is known.
START_OVER: Final = frozenset({State.READY, State.FAILED, State.BACKOFF, State.STOPPED})
_DOWN: Final = frozenset({State.STOPPED})

Result = TypeVar("Result")


class FleetTraffic(Traffic, Protocol):
    """The part of proxy.router.router.Router that a fleet needs."""

    def admit(self, upstream: Upstream, restored: Iterable[RestoredSlot], /) -> None:
        """Send requests to an instance, which began with these slots."""

    def conversation_fingerprints(
        self, name: str, slots: Sequence[SlotState], /
    ) -> Mapping[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots, by slot."""


class Fleet:
    """Every instance of every model.

    Args:
        planner: Plans what is started from now on.
        traffic: The proxy.
        emit: Emits events.
        on_change: Called after each change of an instance's state.

    Attributes:
        models: By name, in the order of the settings; those that are being removed come last.
        planner: Makes what is started from now on.
    """

    def __init__(
        self,
        planner: LaunchPlanner,
        traffic: FleetTraffic,
        emit: Emit,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._traffic = traffic
        self._emit = emit
        self.planner = planner
        self._on_change = on_change
        self._lives: asyncio.TaskGroup | None = None
        self._errands: set[asyncio.Task[Any]] = set()
        self.models: dict[str, Model] = {}
        for entry in planner.entries.values():
            self.models[entry.name] = Model(entry, planner.model_settings(entry.name))
            for number in range(planner.replicas(entry.name).count):
                self.add(ReplicaId(entry.name, number), planner)

    async def serve(self) -> None:
        """Run every instance's life, until cancelled; then kill what is left."""
        try:
            async with asyncio.TaskGroup() as self._lives:
                for replica in self.all_replicas():
                    self._serve(replica)
                await asyncio.get_running_loop().create_future()  # until cancelled: more may come
        finally:
            for errand in self._errands:
                errand.cancel()

    # Looking at it.

    def all_replicas(self) -> tuple[Replica, ...]:
        """Return all replicas, those that come and leave included."""
        return tuple(replica for model in self.models.values() for replica in model.all_replicas)

    def replicas(self) -> tuple[Replica, ...]:
        """Return the replicas that hold their places."""
        return tuple(replica for model in self.models.values() for replica in model.replicas)

    def replica(self, instance: str) -> Replica:
        """Return the replica that an instance of this name is."""
        return next(replica for replica in self.all_replicas() if replica.name == instance)

    def _find(self, instance: str) -> Replica | None:
        return next((one for one in self.all_replicas() if one.name == instance), None)

    def is_retiring(self, replica: Replica) -> bool:
        """Return whether a replica only finishes what it holds."""
        return replica in self.models[replica.place.model].leaving

    def select(self, names: Sequence[str] = ()) -> list[Model]:
        """Return the named models, or all.

        Raises:
            NoSuchModel: A name is not configured.
        """
        known = self._configured()
        for name in names:
            if name not in known:
                there = ", ".join(known) or "none"
                raise NoSuchModel(f"no model is named {name!r}", hint=f"models there are: {there}")
        return [self.models[name] for name in names or known]

    def instances(self, names: Sequence[str] = ()) -> Iterator[Instance]:
        """Yield the instances of the named models, or of all, those that leave left out.

        Raises:
            NoSuchModel: A name is not configured.
        """
        for model in self.select(names):
            yield from (replica.instance for replica in (*model.replicas, *model.coming))

    def _configured(self) -> list[str]:
        return [name for name, model in self.models.items() if model.is_configured]

    # Commanding it.

    def command(self, verb: str, names: Sequence[str] = ()) -> Callable[[], bool]:
        """Begin to start, stop or restart models; return what tells whether that is over.

        Raises:
            NoSuchModel: A name is not configured; nothing was begun.
            SettingsInvalid: The verb is none of these.
        """
        instances = tuple(self.instances(names))
        if verb == "stop":
            return _begin(instances, Instance.stop, _DOWN)
        if verb == "start":
            return _begin(instances, Instance.start, START_OVER)
        if verb == "restart":  # which leaves each of these states at once
            return _begin(instances, Instance.restart, START_OVER)
        raise SettingsInvalid(f"no command is named {verb!r}")

    def spawn(self, errand: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        """Begin something that ends with the fleet at the latest; its failure is noted.

        Raises:
            DaemonBusy: The fleet is not served, or no more.
        """
        if self._lives is None:
            errand.close()
            raise DaemonBusy("the daemon is ending", hint="corral start starts another")
        # In no group: its failure is told to who awaits it, and must not end the others.
        task = asyncio.get_running_loop().create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, errand: asyncio.Task[Any]) -> None:
        self._errands.discard(errand)
        if not errand.cancelled() and (error := errand.exception()):
            FAILURES.note("errand", error)

    async def all_down(self) -> None:
        """Wait until each instance, those that leave included, was STOPPED."""
        for replica in self.all_replicas():
            await replica.instance.wait(_DOWN)

    # What the proxy reports; an instance may be gone by then.

    def overdue(self, instance: str, reason: str) -> None:
        """Restart an instance whose engine does not stop computing for a client that left."""
        if replica := self._find(instance):
            replica.instance.overdue(replica.instance.snapshot().run, reason)

    def restore_verified(self, instance: str, id_slot: int, timings: Timings) -> None:
        """Check the first response to a conversation in the slot that it was restored to."""
        if replica := self._find(instance):
            replica.slots.restore_used(id_slot, timings)

    # Changes. None of these waits; what follows runs in tasks.

    def set_planner(self, planner: LaunchPlanner) -> None:
        """Take new settings in: their models and their order."""
        self.planner = planner
        found = {name: self.models.get(name) for name in planner.entries}
        rest = {name: model for name, model in self.models.items() if name not in found}
        self.models = {
            name: model or Model(planner.entries[name], planner.model_settings(name))
            for name, model in found.items()
        } | rest
        for name in found:
            self.models[name].residency = planner.model_settings(name)

    def add(self, place: ReplicaId, planner: LaunchPlanner) -> Replica:
        """Make a replica in a place that is free; it is down until somebody starts it."""
        replica = self._make(place, planner)
        model = self.models[place.model]
        if not model.is_configured:
            model.entry = planner.entry(place.model)
        model.set_replica(replica)
        return replica

    def add_beside(self, old: Replica, planner: LaunchPlanner) -> Replica:
        """Make a replica that may follow one that serves."""
        replica = self._make(old.place, planner)
        model = self.models[old.place.model]
        model.coming = (*model.coming, replica)
        return replica

    def replace(self, old: Replica, new: Replica) -> None:
        """Give one replica's place to the one that came up beside it, and let it finish."""
        self.models[old.place.model].set_replica(new)
        self.apply_settings(new, new.planner)
        self.retire(old)

    def apply_settings(self, replica: Replica, planner: LaunchPlanner) -> None:
        """Have a replica's runs made by another workshop from its next one on."""
        replica.planner = planner
        policy = planner.restart_policy(replica.place.model)
        replica.instance.configure(self.planner.supervisor, policy)
        model = self.models[replica.place.model]
        model.entry = planner.entry(replica.place.model)
        facts = replica.instance.snapshot()
        if facts.state is State.READY:
            self._admit(replica, facts)  # under what its entry now says

    def retire(self, replica: Replica) -> None:
        """Let a replica finish what it holds, end it, and forget it."""
        self.models[replica.place.model].retire(replica)
        replica.instance.stop()
        if self._lives:
            self._lives.create_task(
                persist("leaving", lambda: self._leave(replica)), name=f"{replica.name} leaves"
            )

    def _make(self, place: ReplicaId, planner: LaunchPlanner) -> Replica:
        taken = {replica.name for replica in self.all_replicas()}
        replica = Replica(place, name_for(place, taken), planner)
        replica.slots = self._slot_manager(replica)
        replica.instance = Instance(
            name=replica.name,
            model=place.model,
            launch=replica.launch,
            limits=self.planner.supervisor,
            policy=planner.restart_policy(place.model),
            traffic=self._traffic,
            admit=lambda snapshot: self._admit(replica, snapshot),
            emit=self._tell,
            persister=replica.slots,
        )
        self._serve(replica)
        return replica

    def _admit(self, replica: Replica, snapshot: InstanceSnapshot) -> None:
        upstream = replica.upstream(snapshot, self.models[snapshot.model].entry.aliases)
        self._traffic.admit(upstream, replica.restored_slots(snapshot.run))

    def _fingerprints(self, name: str, slots: Sequence[SlotState]) -> dict[int, str]:
        found = self._traffic.conversation_fingerprints(name, slots)
        return {id_slot: one.encoded for id_slot, one in found.items()}

    def _tell(self, name: str, /, **fields: object) -> None:
        self._emit(name, **fields)
        if name == "instance.state_changed":
            self._on_change()

    def _slot_manager(self, replica: Replica) -> SlotManager:
        def model() -> Model:
            return self.models[replica.place.model]

        return SlotManager(
            owner=lambda: cache_commands.replica_ref(model(), replica),
            plan=lambda: replica.plan,
            persistence=lambda: replica.planner.slot_persistence,
            fingerprints=lambda slots: self._fingerprints(replica.name, slots),
            save_predecessors=lambda: cache_commands.save_predecessors(model(), replica),
            emit=self._emit,
        )

    def _serve(self, replica: Replica) -> None:
        if self._lives:
            replica.life = self._lives.create_task(
                persist("instance", replica.instance.serve), name=replica.name
            )

    async def _leave(self, replica: Replica) -> None:
        await replica.instance.wait(_DOWN)  # the limits of its states are the deadline
        if replica.life:
            replica.life.cancel()
            await asyncio.wait([replica.life])
        model = self.models[replica.place.model]
        model.forget(replica)
        if not model.all_replicas:
            del self.models[replica.place.model]


def _begin(
    instances: Sequence[Instance], tell: Callable[[Instance], None], over: frozenset[State]
) -> Callable[[], bool]:
    for instance in instances:
        tell(instance)
    return lambda: all(instance.snapshot().state in over for instance in instances)
