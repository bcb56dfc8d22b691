"""The memory that models take, may take, and have left; which models to unload for another one.

The least valuable models are unloaded first: those idle longest, weighted by the cost of restoring
them, which is loading and computing their cached prompts again. If the choice frees more than is
needed, models stay, the most valuable first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from proxy.dashboard.host import HostMemory
from supervisor.engine.states import State
from supervisor.errors import CorralError, DeviceMemoryShort
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import LaunchFingerprint
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.start_memory import usable_bytes
from supervisor.fleet.stats import memory_bytes, own_bytes
from supervisor.plan.estimate import Estimate, MemoryBreakdown
from supervisor.plan.setting import SettingsByFlag as FlagSettings
from supervisor.plan.setting import values
from supervisor.system import machine
from supervisor.system.machine import Machine

# Bytes by memory: "host", or a device's name.
Bytes = Mapping[str, int]


def fits(required: Bytes, free: Bytes) -> bool:
    """Return whether every memory has enough free bytes; a memory that is not listed has none."""
    return all(size <= max(0, free.get(name, 0)) for name, size in required.items())


def observe(
    taken_before: Bytes, total: Bytes, free: Bytes, held: Bytes, *, may_grow: bool
) -> tuple[Bytes, Bytes]:
    """Return the memory of other programs by device if our models hold `held`, and `returning`.

    While the free memory may grow, because an engine has just ended, missing memory is assumed to
    be returned: it is `returning`, or other programs take it too.
    """
    missing = {
        name: max(0, total[name] - size - held.get(name, 0))
        for name, size in free.items()
        if name in total
    }
    if not may_grow:
        return missing, {}
    taken = {name: min(size, taken_before.get(name, 0)) for name, size in missing.items()}
    return taken, {name: size - taken[name] for name, size in missing.items()}


def needed_by_others(taken: Bytes, usual: Bytes, total: Bytes) -> frozenset[str]:
    """Return the devices of which other programs take clearly more than usual."""
    return frozenset(
        name
        for name, size in taken.items()
        if size - usual.get(name, 0) > _GROWTH_SHARE * total[name]
    )


# The buffers of our engines grow by less after their load.
_GROWTH_SHARE: Final = 0.01
HOST: Final = "host"
# A worker serves one engine at a time, so a model takes its whole capacity.
_WORKER: Final = "worker {}"
# More launch fingerprints than a machine has in a year of reloads.
_OBSERVED_MAX: Final = 256
# An instance that waits for this holds nothing, so it must not keep other models out.
_WAITS_FOR_DEVICE: Final = DeviceMemoryShort.code

# The adapted values, and the reductions.
_Changed = tuple[FlagSettings, FlagSettings]
# The memory of an engine in these states is unknown.
_CHANGING: Final = frozenset(
    {State.STARTING, State.WARMING, State.DRAINING, State.STOPPING, State.KILLING}
)


def _purposes(taken: MemoryBreakdown) -> Counter[str]:
    caches = taken.kv + taken.prompt_cache + taken.checkpoints
    weights = taken.weights + taken.draft + taken.projector
    buffers = taken.total - weights - caches
    return Counter(weights=weights, caches=caches, buffers=buffers)


class ObservedMemory:
    """Most memory without mapped files by launch fingerprint: a full cache fills again."""

    def __init__(self, *, observed_max: int = _OBSERVED_MAX) -> None:
        self._observed_max = observed_max
        self._own_bytes: dict[str, int] = {}  # the latest noted last

    def note(self, fingerprint: LaunchFingerprint, own_bytes: int) -> int:
        """Note the present memory, 0 without a process; return the most."""
        flags = sorted(fingerprint.flags.items())
        files = (fingerprint.engine, fingerprint.model, fingerprint.draft)
        key = repr((files, fingerprint.library_dirs, flags, fingerprint.args))
        most = self._own_bytes[key] = max(own_bytes, self._own_bytes.pop(key, 0))
        if len(self._own_bytes) > self._observed_max:
            del self._own_bytes[next(iter(self._own_bytes))]
        return most


class MemoryUsage:
    """The memory of models: estimates, raised to the memory that instances took."""

    def __init__(
        self,
        fleet: Fleet,
        read_machine: Callable[[], Machine] = machine.read,
        observed: ObservedMemory | None = None,
    ) -> None:
        self._fleet = fleet
        self._read_machine = read_machine
        self._planner = fleet.planner
        # By name and whether on trial, with the changed values of the plan.
        self._estimates: dict[tuple[str, bool], tuple[_Changed, Estimate | None]] = {}
        self._observed = observed or ObservedMemory()
        # The memory of devices that other programs take, and that ended engines have yet to return.
        self._taken: Bytes = {}
        # What they took at most when our engines had loaded.
        self._usual: Bytes = {}
        self._runs: frozenset[tuple[str, int]] = frozenset()
        self.returning: Bytes = {}

    def capacity(self) -> Bytes:
        """Return the bytes of each memory that models may take when none is loaded."""
        try:
            found = self._fleet.planner.capacity(self._fleet.planner.engine())
        except CorralError:  # without an engine nothing is loaded; its start reports the error
            return {}
        devices = Counter(dict(found.devices))
        devices.subtract(self._taken)
        devices.subtract(self._fleet.device_memory.reserved_bytes)
        return {HOST: found.host, **devices, **self._workers_of(self._fleet.planner.entries)}

    def by_purpose(self) -> Mapping[str, HostMemory]:
        """Return the present use of each memory, main memory first.

        Main memory is measured: the memory of an engine beyond its weights and buffers counts as
        caches. Devices are estimated, with other programs as of the last load on one.
        """
        here = self._read_machine()
        devices: Bytes = {}
        with suppress(CorralError):  # without an engine there are no devices
            devices = self._fleet.planner.capacity(self._fleet.planner.engine()).devices
        used: dict[str, Counter[str]] = {name: Counter() for name in (HOST, *devices)}
        held_bytes = 0
        for model in self._fleet.models.values():
            mapped = 0
            for replica in model.all_replicas:
                pid = replica.instance.snapshot().pid
                if not pid or not (estimate := self._estimate(replica)):
                    continue
                own, resident = own_bytes(pid) or 0, memory_bytes(pid) or 0
                held_bytes += own
                mapped = max(mapped, min(estimate.mapped_bytes, resident - own))
                expected = _purposes(estimate.host)
                weights = min(own, expected["weights"] - estimate.mapped_bytes)
                buffers = min(own - weights, expected["buffers"])
                caches = own - weights - buffers
                used[HOST].update(weights=weights, buffers=buffers, caches=caches)
                for name in estimate.devices.keys() & devices.keys():
                    used[name].update(_purposes(estimate.devices[name]))
            used[HOST].update(weights=mapped)
        others = {
            **self._taken,
            HOST: max(0, here.memory_bytes - here.memory_available_bytes - held_bytes),
        }
        return {
            name: HostMemory(
                total=devices.get(name, here.memory_bytes),
                weights=use["weights"],
                caches=use["caches"],
                buffers=use["buffers"],
                others=others.get(name, 0),
            )
            for name, use in used.items()
        }

    @property
    def needed_by_others(self) -> frozenset[str]:
        """The devices of which other programs need more memory; empty if no model gives way."""
        return frozenset(self._fleet.device_memory.reserved_bytes)

    async def refresh_devices(self, models: Iterable[Model], *, is_full: bool = False) -> bool:
        """List devices again if one of these models uses them; return whether that was done.

        Not while an engine loads or ends, because its present memory is unknown. An engine that
        finds no memory for itself may be unable to list a device that `is_full`.
        """
        listed = self._fleet.device_memory
        replicas = self._fleet.all_replicas()
        is_changing = any(replica.instance.snapshot().state in _CHANGING for replica in replicas)
        if listed.is_fresh or is_changing or not self.take_devices(models):
            return False
        with suppress(CorralError):  # without an engine nothing is loaded
            engine = self._fleet.planner.engine()
            free = await listed.read(engine)
            total, held = self._fleet.planner.capacity(engine).devices, self._held_bytes()
            if is_full and not free:
                free = dict.fromkeys(total, 0)
            self._taken, self.returning = observe(
                self._taken, total, free, held, may_grow=listed.may_grow
            )
            self._note_growth(total)
            return True
        return False

    def _note_growth(self, total: Bytes) -> None:
        """Reserve memory of the devices that other programs need, if models give way to them."""
        settings, taken = self._fleet.planner.settings.devices, self._taken
        present = filter(_is_present, self._fleet.all_replicas())
        runs = frozenset((each.name, each.instance.snapshot().run) for each in present)
        # Estimates are not exact: only after a load is the rest what other programs take.
        if runs - self._runs:
            self._usual = taken
        self._usual = {name: min(size, self._usual.get(name, size)) for name, size in taken.items()}
        self._runs = runs
        needed = needed_by_others(taken, self._usual, total)
        self._fleet.device_memory.reserved_bytes = (
            {} if settings.yields == "never" else dict.fromkeys(needed, settings.reserve)
        )

    def take_devices(self, models: Iterable[Model]) -> bool:
        """Return whether any of these models uses a device."""
        replicas = (replica for model in models for replica in model.replicas)
        return any(estimate.devices for estimate in filter(None, map(self._estimate, replicas)))

    def _held_bytes(self) -> Counter[str]:
        held: Counter[str] = Counter()
        for model in self._fleet.models.values():
            held.update(self._usage_of(filter(_is_present, model.all_replicas)))
        return held

    def free(self) -> Bytes:
        """Return bytes that models may take and the machine has, less those of loading models."""
        left = Counter(self.capacity())
        outstanding = 0
        for model in self._fleet.models.values():
            present = [replica for replica in model.all_replicas if _is_present(replica)]
            if present:
                required = self._usage_of(present)
                left.subtract(required)
                outstanding += max(0, required[HOST] - sum(map(_resident, present)))
        left.subtract(self.returning)
        return {**left, HOST: min(left[HOST], usable_bytes(self._read_machine()) - outstanding)}

    def has_room(self, model: Model) -> bool:
        """Return whether a model that is not loaded fits beside what is, not reduced."""
        return fits(self._usage_of(model.replicas), self.free())

    def required_bytes(self, models: Iterable[Model]) -> Mapping[str, Bytes]:
        """Return the bytes that each model takes, or would take; mapped weights count once.

        Main memory is at most the capacity, so that a model which grew beyond it is still loaded,
        alone. A model to load needs at most the memory of a device without other programs, unless
        it needs more than the whole device: others make room for it, and its start finds out
        whether that is enough.
        """
        capacity, planner = self.capacity(), self._fleet.planner.reading_once()
        return {model.entry.name: self._model_bytes(model, capacity, planner) for model in models}

    def _model_bytes(self, model: Model, capacity: Bytes, planner: LaunchPlanner) -> Bytes:
        estimates = (self._estimate(replica, planner) for replica in model.replicas)
        found = [estimate for estimate in estimates if estimate]
        required = self._usage_of(model.replicas)
        if found:
            own_bytes = sum(estimate.own_at_start_bytes for estimate in found)
            at_start = found[0].mapped_bytes + own_bytes
            required[HOST] = max(at_start, min(required[HOST], capacity.get(HOST, 0)))
            for name in () if any(map(_is_present, model.replicas)) else found[0].devices:
                left = max(0, capacity.get(name, 0))
                if required[name] <= left + self._taken.get(name, 0):
                    required[name] = min(required[name], left)
        return required

    def _usage_of(self, replicas: Iterable[Replica]) -> Counter[str]:
        required: Counter[str] = Counter()
        mapped_bytes = 0
        for replica in replicas:
            if found := self._estimate(replica):
                mapped_bytes = max(mapped_bytes, found.mapped_bytes)
                required[HOST] += max(found.own_at_start_bytes, self._own_bytes(replica))
                required.update({name: device.total for name, device in found.devices.items()})
                required.update(self._workers_of([replica.place.model]))
        required[HOST] += mapped_bytes
        return required

    def _workers_of(self, models: Iterable[str]) -> Bytes:
        workers = self._fleet.planner.workers
        return {
            _WORKER.format(address.name): 1
            for model in models
            for address in workers.addresses_of(model)
        }

    def _own_bytes(self, replica: Replica) -> int:
        pid, found = replica.instance.snapshot().pid, replica.fingerprint
        if found is None:
            return 0
        if replica.plan and replica.plan.adapted:
            found = replace(found, flags={**found.flags, **values(replica.plan.adapted)})
        return self._observed.note(found, (own_bytes(pid) or 0) if pid else 0)

    def _estimate(self, replica: Replica, planner: LaunchPlanner | None = None) -> Estimate | None:
        """Return an instance's estimate, by `planner` if need be; None if it cannot be planned."""
        if self._fleet.planner is not self._planner:
            self._planner, self._estimates = self._fleet.planner, {}
        name, planner = replica.place.model, planner or self._planner
        trial = planner.trial_at(replica.place) if name in planner.entries else None
        key = name, trial is not None
        changed = planner.adapted.get(name, {}), planner.reductions_of(name)
        if key not in self._estimates or self._estimates[key][0] != changed:
            estimate: Estimate | None = None
            with suppress(CorralError):  # its start reports why
                plan = planner.plan_trial(name, trial) if trial else planner.plan(name)
                estimate = plan.estimate
            self._estimates[key] = changed, estimate
        return self._estimates[key][1]


def _is_present(replica: Replica) -> bool:
    facts = replica.instance.snapshot()
    waits = facts.state is State.BACKOFF and facts.cause and facts.cause.code == _WAITS_FOR_DEVICE
    return facts.state not in {State.STOPPED, State.FAILED} and not waits


def _resident(replica: Replica) -> int:
    """Return the memory of an instance, and of its local workers once it is ready."""
    facts = replica.instance.snapshot()
    is_ready = facts.state is State.READY and replica.plan is not None
    held = replica.plan.estimate.local_workers_bytes if is_ready and replica.plan else 0
    return held + (memory_bytes(facts.pid) or 0 if facts.pid else 0)
