"""Memory that models take, may take, and what is left."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from supervisor.admission.evict import Bytes
from supervisor.admission.other_programs import OtherPrograms, observe
from supervisor.errors import CorralError, DeviceMemoryShort
from supervisor.flags.setting import Settings as FlagSettings
from supervisor.flags.setting import values
from supervisor.flags.trial import TrialSettings
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launch_id import LaunchFingerprint
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.process_memory import memory_bytes, own_bytes
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.instance.states import State
from supervisor.memory.estimate import Estimate
from supervisor.memory.fit import RESERVE_SHARE

HOST: Final = "host"
# A worker serves one engine at a time: its whole capacity is taken by the model that uses it.
_WORKER: Final = "worker {}"
# More launch fingerprints than a machine has in a year of reloads.
_OBSERVED_MAX: Final = 256
# It holds nothing, and must not keep other models out for as long as other programs stay.
_WAITS_FOR_DEVICE: Final = DeviceMemoryShort.code

# What the daemon changed while it serves, and what was given up.
_Changed = tuple[FlagSettings, FlagSettings]
# Of an engine in these states it is not known how much it holds.
_CHANGING: Final = frozenset(
    {State.STARTING, State.WARMING, State.DRAINING, State.STOPPING, State.KILLING}
)


class ObservedMemory:
    """The most memory of their own that instances of each launch fingerprint were seen to take.

    The most, because a cache that has filled once will fill again.
    """

    def __init__(self, *, observed_max: int = _OBSERVED_MAX) -> None:
        self._observed_max = observed_max
        self._own_bytes: OrderedDict[str, int] = OrderedDict()

    def note(self, fingerprint: LaunchFingerprint, own_bytes: int) -> None:
        key = _key(fingerprint)
        self._own_bytes[key] = max(own_bytes, self._own_bytes.get(key, 0))
        self._own_bytes.move_to_end(key)
        while len(self._own_bytes) > self._observed_max:
            self._own_bytes.popitem(last=False)

    def own_bytes(self, fingerprint: LaunchFingerprint) -> int:
        """Return the most that was seen; 0 for a launch fingerprint that never ran."""
        key = _key(fingerprint)
        if key in self._own_bytes:
            self._own_bytes.move_to_end(key)
        return self._own_bytes.get(key, 0)


class MemoryUsage:
    """Estimates, raised to what instances were seen to take."""

    def __init__(
        self,
        fleet: Fleet,
        read_machine: Callable[[], Machine] = machine.read,
        observed: ObservedMemory | None = None,
    ) -> None:
        self._fleet = fleet
        self._read_machine = read_machine
        self._planner = fleet.planner
        # By name and whether on trial, for the values that were planned with.
        self._estimates: dict[tuple[str, bool], tuple[_Changed, Estimate | None]] = {}
        self._observed = observed or ObservedMemory()
        self._others = OtherPrograms()

    def capacity(self) -> Bytes:
        """Return what models may take of each memory when none is loaded."""
        try:
            found = self._fleet.planner.capacity(self._fleet.planner.engine())
        except CorralError:  # without an engine nothing is loaded, and its start reports why
            return {}
        devices = Counter(dict(found.devices))
        devices.subtract(self._others.taken)
        return {HOST: found.host, **devices, **self._workers_of(self._fleet.planner.entries)}

    async def look(self, models: Iterable[Model]) -> None:
        """List devices again, where one of these models is to be loaded and takes memory of them.

        Not while an engine loads or ends: what it takes at the moment is not known.
        """
        listed = self._fleet.device_memory
        if listed.is_fresh or not any(map(self._takes_devices, models)) or self._is_changing():
            return
        with suppress(CorralError):  # without an engine nothing is loaded
            engine = self._fleet.planner.engine()
            free = await listed.read(engine)
            total, held = self._fleet.planner.capacity(engine).devices, self._held()
            self._others = observe(self._others, total, free, held, may_grow=listed.may_grow)

    def returning(self) -> Bytes:
        """Return what engines that have ended are yet to give back of devices."""
        return self._others.returning

    def _takes_devices(self, model: Model) -> bool:
        return any(one.devices for one in filter(None, map(self._estimate, model.replicas)))

    def _is_changing(self) -> bool:
        replicas = self._fleet.all_replicas()
        return any(one.instance.snapshot().state in _CHANGING for one in replicas)

    def _held(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for model in self._fleet.models.values():
            held.update(self._of(filter(_is_present, model.all_replicas)))
        return held

    def free(self) -> Bytes:
        """Return what they may still take, and the machine has free.

        What a loading model has yet to take is not free.
        """
        left = Counter(self.capacity())
        outstanding = 0
        for model in self._fleet.models.values():
            present = [replica for replica in model.all_replicas if _is_present(replica)]
            if present:
                required = self._of(present)
                left.subtract(required)
                outstanding += max(0, required[HOST] - sum(map(_resident, present)))
        left.subtract(self._others.returning)
        here = self._read_machine()
        available = here.memory_available_bytes - int(here.memory_bytes * RESERVE_SHARE)
        return {**left, HOST: min(left[HOST], available - outstanding)}

    def required(self, models: Iterable[Model]) -> Mapping[str, Bytes]:
        """Return what each model takes, or would take; weights that are mapped count once.

        At most all there is, so that a model which grew beyond that is still loaded, alone. Of a
        device, at most what other programs leave: others make room for it, and its start finds out
        whether that suffices. A model that needs more than the whole device needs what it needs.
        """
        capacity, planner = self.capacity(), self._fleet.planner.reading_once()
        return {model.entry.name: self._required(model, capacity, planner) for model in models}

    def _required(self, model: Model, capacity: Bytes, planner: LaunchPlanner) -> Bytes:
        found = [one for replica in model.replicas if (one := self._estimate(replica, planner))]
        required = self._of(model.replicas)
        if found:
            at_start = found[0].mapped_bytes + sum(one.own_at_start_bytes for one in found)
            required[HOST] = max(at_start, min(required[HOST], capacity.get(HOST, 0)))
            for name in found[0].devices:
                left = max(0, capacity.get(name, 0))
                if required[name] <= left + self._others.taken.get(name, 0):
                    required[name] = min(required[name], left)
        return required

    def _of(self, replicas: Iterable[Replica]) -> Counter[str]:
        required: Counter[str] = Counter()
        mapped_bytes = 0
        for replica in replicas:
            if found := self._estimate(replica):
                mapped_bytes = max(mapped_bytes, found.mapped_bytes)
                required[HOST] += max(found.own_at_start_bytes, self._own(replica))
                required.update({name: device.total for name, device in found.devices.items()})
                required.update(self._workers_of([replica.place.model]))
        required[HOST] += mapped_bytes
        return required

    def _workers_of(self, models: Iterable[str]) -> Bytes:
        workers = self._fleet.planner.workers
        return {
            _WORKER.format(one.name): 1 for model in models for one in workers.addresses_of(model)
        }

    def _own(self, replica: Replica) -> int:
        pid, found = replica.instance.snapshot().pid, replica.fingerprint
        if found is None:
            return 0
        if replica.plan and replica.plan.adapted:
            found = replace(found, flags={**found.flags, **values(replica.plan.adapted)})
        if pid:
            self._observed.note(found, own_bytes(pid) or 0)
        return self._observed.own_bytes(found)

    def _estimate(self, replica: Replica, planner: LaunchPlanner | None = None) -> Estimate | None:
        """Return the estimate for an instance; None where it cannot be planned.

        `planner` plans it, if it must be planned; by default that of the fleet.
        """
        if self._fleet.planner is not self._planner:
            self._planner, self._estimates = self._fleet.planner, {}
        name, planner = replica.place.model, planner or self._planner
        trial = planner.places.trial_at(replica.place) if name in planner.entries else None
        key, changed = (name, trial is not None), (planner.adapted(name), planner.reduced(name))
        if key not in self._estimates or self._estimates[key][0] != changed:
            self._estimates[key] = changed, _planned(planner, name, trial)
        return self._estimates[key][1]


def _planned(planner: LaunchPlanner, name: str, trial: TrialSettings | None) -> Estimate | None:
    try:
        plan = planner.plan_trial(name, trial) if trial else planner.plan(name)
    except CorralError:  # its start reports why
        return None
    return plan.estimate


def _key(fingerprint: LaunchFingerprint) -> str:
    flags = sorted(fingerprint.flags.items())
    files = (fingerprint.engine, fingerprint.model, fingerprint.draft)
    return repr((files, fingerprint.library_dirs, flags, fingerprint.args))


def _is_present(replica: Replica) -> bool:
    facts = replica.instance.snapshot()
    waits = facts.state is State.BACKOFF and facts.cause and facts.cause.code == _WAITS_FOR_DEVICE
    return facts.state not in {State.STOPPED, State.FAILED} and not waits


def _resident(replica: Replica) -> int:
    """Memory that an instance takes, with what workers here hold for it once it is ready."""
    facts = replica.instance.snapshot()
    is_ready = facts.state is State.READY and replica.plan is not None
    held = replica.plan.estimate.local_workers_bytes if is_ready and replica.plan else 0
    return held + (memory_bytes(facts.pid) or 0 if facts.pid else 0)
