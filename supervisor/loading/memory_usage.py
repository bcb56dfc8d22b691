"""Memory that models take, may take, and what is left; which models to unload for another one.

Chooses which models to unload so that another one fits in memory. The least valuable go first:
those idle longest, weighed by the cost of having them back as they were, which is loading them and
computing their cached prompts again. A model that turns out not to be needed once all are chosen
stays, the most valuable first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

from supervisor.engine.states import State
from supervisor.errors import CorralError, DeviceMemoryShort
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import LaunchFingerprint
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.stats import memory_bytes, own_bytes
from supervisor.plan.estimate import Estimate
from supervisor.plan.fit import RESERVE_SHARE
from supervisor.plan.plan import TrialSettings
from supervisor.plan.setting import SettingsByFlag as FlagSettings
from supervisor.plan.setting import values
from supervisor.system import machine
from supervisor.system.machine import Machine

# Bytes by memory: "host", or a device's name.
Bytes = Mapping[str, int]

# SmolLM2-135M computes 165 tokens of a prompt a second on one core. Only the order of candidates
# follows from it.
_SECONDS_PER_TOKEN: Final = 0.006


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A model that may be unloaded; `frees` is what it takes of each memory."""

    name: str
    idle_s: float
    reload_cost_s: float
    cached_tokens: int
    frees: Bytes

    @property
    def value(self) -> tuple[float, str]:
        """Sort key, the least valuable first; of two alike the name decides.

        An hour idle weighs as much as an hour of reloading.
        """
        return_cost_s = self.reload_cost_s + self.cached_tokens * _SECONDS_PER_TOKEN
        return return_cost_s / (1 + self.idle_s), self.name


def fits(required: Bytes, free: Bytes) -> bool:
    """Return whether every memory has enough free; one that is not listed has none."""
    return all(size <= max(0, free.get(name, 0)) for name, size in required.items())


def choose_victims(
    required: Bytes, free: Bytes, candidates: Iterable[EvictionCandidate]
) -> tuple[str, ...] | None:
    """Return the models to unload, the first first; None where unloading all is not enough."""
    chosen: list[EvictionCandidate] = []
    for candidate in sorted(candidates, key=lambda candidate: candidate.value):
        if fits(required, _free_after(free, chosen)):
            break
        chosen.append(candidate)
    if not fits(required, _free_after(free, chosen)):
        return None
    for spared in reversed(tuple(chosen)):
        others = [candidate for candidate in chosen if candidate is not spared]
        if fits(required, _free_after(free, others)):
            chosen = others
    return tuple(candidate.name for candidate in chosen)


def _free_after(free: Bytes, unloaded: Sequence[EvictionCandidate]) -> Bytes:
    total = Counter(dict(free))
    for candidate in unloaded:
        total.update(candidate.frees)
    return total


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Bytes by device.

    Attributes:
        taken: What they take.
        returning: What engines of ours that have ended are yet to give back, or else they take too.
    """

    taken: Bytes = field(default_factory=dict)
    returning: Bytes = field(default_factory=dict)


def observe(
    before: OtherPrograms, total: Bytes, free: Bytes, held: Bytes, *, may_grow: bool
) -> OtherPrograms:
    """Return what follows from the free memory of devices of which models hold `held`.

    While it may grow, because an engine has just ended, what is missing is taken to come back.
    """
    missing = {
        name: max(0, total[name] - size - held.get(name, 0))
        for name, size in free.items()
        if name in total
    }
    if not may_grow:
        return OtherPrograms(missing)
    taken = {name: min(size, before.taken.get(name, 0)) for name, size in missing.items()}
    return OtherPrograms(taken, {name: size - taken[name] for name, size in missing.items()})


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
        return any(
            estimate.devices for estimate in filter(None, map(self._estimate, model.replicas))
        )

    def _is_changing(self) -> bool:
        replicas = self._fleet.all_replicas()
        return any(replica.instance.snapshot().state in _CHANGING for replica in replicas)

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
        found = [
            estimate for replica in model.replicas if (estimate := self._estimate(replica, planner))
        ]
        required = self._of(model.replicas)
        if found:
            at_start = found[0].mapped_bytes + sum(
                estimate.own_at_start_bytes for estimate in found
            )
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
            _WORKER.format(address.name): 1
            for model in models
            for address in workers.addresses_of(model)
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
        key, changed = (
            (name, trial is not None),
            (planner.adapted(name), planner.reductions_of(name)),
        )
        if key not in self._estimates or self._estimates[key][0] != changed:
            self._estimates[key] = changed, _planned_estimate(planner, name, trial)
        return self._estimates[key][1]


def _planned_estimate(
    planner: LaunchPlanner, name: str, trial: TrialSettings | None
) -> Estimate | None:
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
