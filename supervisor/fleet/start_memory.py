"""Device memory of a start: whether it is free, and the reductions after it was not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from supervisor.builds import discover
from supervisor.builds.discover import Device, Engine
from supervisor.engine.exit_cause import FailureCause
from supervisor.errors import CorralError, DeviceMemoryShort
from supervisor.events import Emit
from supervisor.fleet.model import Replica
from supervisor.plan.estimate import Estimate
from supervisor.plan.fit import RESERVE_SHARE
from supervisor.plan.plan import Plan
from supervisor.plan.shortage import next_reduction, shortage
from supervisor.system import machine
from supervisor.system.machine import Machine

# A listing takes 50 ms and more; at this age it is fresh enough to choose a model to unload.
_FRESH_S: Final = 0.2
# Loads wait for a listing; after this time the free memory counts as unknown.
_LIMIT_S: Final = 5.0


class DeviceMemory:
    """The free memory of devices at the latest listing.

    It may grow for some time: a driver may take seconds to return the memory of an ended process.
    """

    def __init__(
        self,
        list_devices: Callable[[Engine, float], Sequence[Device]] = discover.list_devices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_devices = list_devices
        self._clock = clock
        self._grows_until_s = self._read_at_s = float("-inf")
        self.free_bytes: Mapping[str, int] = {}
        self.reserved_bytes: Mapping[str, int] = {}  # left free, by device

    @property
    def may_grow(self) -> bool:
        """Whether the memory of an ended engine may still become free."""
        return self._clock() < self._grows_until_s

    @property
    def is_fresh(self) -> bool:
        return self._clock() - self._read_at_s < _FRESH_S

    def note_exit(self, wait_s: float) -> None:
        """Note the end of an engine that used devices; its memory is returned within `wait_s`."""
        self._grows_until_s = max(self._grows_until_s, self._clock() + wait_s)

    async def read(self, engine: Engine) -> Mapping[str, int]:
        """List the devices again; return the free bytes of each for which they are known."""
        try:
            found = await asyncio.to_thread(self._list_devices, engine, _LIMIT_S)
        except CorralError:  # the start of the engine reports the error
            found = ()
        self.free_bytes, self._read_at_s = discover.free_bytes(found), self._clock()
        return self.free_bytes


_HOST_MEMORY: Final = "host_memory"
# Causes of failure after which a reduced plan is tried.
OUT_OF_MEMORY: Final = frozenset({"device_memory", _HOST_MEMORY, DeviceMemoryShort.code})
_HINT: Final = (
    "end other programs that use the device, or lower ctx-size, parallel or gpu-layers "
    "(`corral plan` shows the memory of each)"
)


class StartMemory:
    """Checks and reduces device memory; looks again after `pause_s` if an engine has ended."""

    def __init__(self, devices: DeviceMemory, emit: Emit, *, pause_s: float = 0.25) -> None:
        self._devices = devices
        self._emit = emit
        self._pause_s = pause_s

    async def is_there(self, replica: Replica) -> bool:
        """Return whether the memory that a replica needs is free; False if more may be free soon.

        Raises DeviceMemoryShort: it is not free, and no ended engine is about to return memory.
        """
        replica.free_bytes = {}
        planner = replica.planner
        engine = planner.engine_at(replica.place)
        if not engine.devices and not planner.workers.addresses_of(replica.place.model):
            return True
        plan = planner.plan_at(replica.place)
        if plan.estimate.devices:
            reserved = self._devices.reserved_bytes
            replica.free_bytes = {
                name: max(0, size - reserved.get(name, 0))
                for name, size in (await self._devices.read(plan.engine)).items()
            }
        plan = self._plan_again(replica, plan)
        replica.attempted = plan.reduced
        reason = shortage(plan.estimate, replica.free_bytes)
        if reason is None:
            return True
        if self._devices.may_grow:
            await asyncio.sleep(self._pause_s)
            return False
        # The engine puts fewer layers on the device, and the others into main memory.
        if plan.estimate.is_fitted and not _exceeds_host(
            planner.plan_at(replica.place, replica.free_bytes).estimate
        ):
            return True
        raise DeviceMemoryShort(f"{plan.model} does not fit now: {reason}", hint=_HINT)

    def _plan_again(self, replica: Replica, plan: Plan) -> Plan:
        """Plan without reductions if the memory that was short is free now."""
        planner = replica.planner
        _, _, _, was_short = planner.reductions.find(planner.entry(plan.model))
        if not was_short:
            return plan
        whole = planner.without_reductions().plan_at(replica.place)
        if shortage(whole.estimate, replica.free_bytes):
            return plan
        planner.reductions.forget(plan.model)
        self._emit("model.restored", model=plan.model, reason="the memory it needs is free again")
        return whole

    def reduce(self, replica: Replica, cause: FailureCause) -> bool:
        """Reduce the plan of a replica that failed to start; return whether to start at once."""
        planner, model = replica.planner, replica.place.model
        may_reduce = planner.may_reduce(model) and planner.trial_at(replica.place) is None
        if cause.code not in OUT_OF_MEMORY or not may_reduce:
            return False
        try:
            plan = planner.plan_at(replica.place, replica.free_bytes)
        except CorralError:  # its next start reports why
            return False
        if replica.attempted != plan.reduced:  # another replica has failed meanwhile
            return True
        return self._reduce(replica, plan, cause)

    def _reduce(self, replica: Replica, plan: Plan, cause: FailureCause) -> bool:
        reductions, entry = replica.planner.reductions, replica.planner.entry(plan.model)

        def is_short(found: Estimate) -> bool:
            if cause.code != _HOST_MEMORY:
                return shortage(found, replica.free_bytes) is not None
            return _exceeds_host(found)

        _, _, kinds, _ = reductions.find(entry)
        reduction = next_reduction(plan.memory_inputs, kinds, plan.from_user, is_short)
        if reduction is None:
            return False
        kind, flags = reduction
        planned = {key: plan.memory_inputs.chosen.get(key) for key in flags}
        was_short = cause.code != _HOST_MEMORY and is_short(plan.estimate)
        known = (f"{key} = {value}" for key, value in planned.items() if value is not None)
        reason = f"with {', '.join(known) or 'more'}, {cause.sentence}"
        reductions.add(entry, kind, flags, reason, was_short=was_short)
        model, why = plan.model, cause.sentence
        for key, after in flags.items():
            self._emit(
                "model.reduced", model=model, key=key, before=planned[key], after=after, reason=why
            )
        return True


def _exceeds_host(found: Estimate) -> bool:
    return found.own_at_start_bytes > usable_bytes(machine.read())


def usable_bytes(here: Machine) -> int:
    """Return the main memory that may be taken now: the available memory, less a reserve."""
    return here.memory_available_bytes - int(here.memory_bytes * RESERVE_SHARE)
