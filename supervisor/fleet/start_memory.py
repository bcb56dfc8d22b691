"""Device memory of an instance that starts: is it there, and what is given up if it was not."""

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
from supervisor.plan.shortage import Reduction, next_reduction, shortage
from supervisor.system import machine

# A listing takes 50 ms and more; one of this age will do to decide what to unload.
_FRESH_S: Final = 0.2
# Loads wait for it; a driver that takes longer says nothing.
_LIMIT_S: Final = 5.0


def _list_engine_devices(engine: Engine) -> Sequence[Device]:
    return discover.list_devices(engine, _LIMIT_S)


class DeviceMemory:
    """The latest listing, and until when it may still grow.

    A driver may take seconds to give back the memory of a process that has ended.
    """

    def __init__(
        self,
        list_devices: Callable[[Engine], Sequence[Device]] = _list_engine_devices,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_devices = list_devices
        self._clock = clock
        self._grows_until_s = self._read_at_s = float("-inf")
        self.free_bytes: Mapping[str, int] = {}

    @property
    def may_grow(self) -> bool:
        """Whether an engine has ended whose memory may yet come back."""
        return self._clock() < self._grows_until_s

    @property
    def is_fresh(self) -> bool:
        return self._clock() - self._read_at_s < _FRESH_S

    def note_exit(self, wait_s: float) -> None:
        """Note the end of an engine that used devices."""
        self._grows_until_s = max(self._grows_until_s, self._clock() + wait_s)

    async def read(self, engine: Engine) -> Mapping[str, int]:
        """List the devices again; return the free bytes of each, as far as they are known."""
        try:
            found = await asyncio.to_thread(self._list_devices, engine)
        except CorralError:  # nothing is known; the start reports what is wrong with the engine
            found = ()
        self.free_bytes, self._read_at_s = discover.free_bytes(found), self._clock()
        return self.free_bytes


_PAUSE_S: Final = 0.25
_HOST_MEMORY: Final = "host_memory"
# Causes after which less is tried.
OUT_OF_MEMORY: Final = frozenset({"device_memory", _HOST_MEMORY, DeviceMemoryShort.code})
_HINT: Final = (
    "end what else uses the device, or lower ctx-size, parallel or gpu-layers "
    "(`corral plan` shows what each takes)"
)


class StartMemory:
    """Checks and reduces what instances take of devices."""

    def __init__(self, devices: DeviceMemory, emit: Emit) -> None:
        self._devices = devices
        self._emit = emit

    async def is_there(self, replica: Replica) -> bool:
        """Whether the memory that a replica needs is free; False while more may come back soon.

        Raises:
            DeviceMemoryShort: It is not, and no engine that ended is about to give memory back.
        """
        replica.free_bytes = {}
        planner = replica.planner
        engine = planner.engine_at(replica.place)
        if not engine.devices and not planner.workers.addresses_of(replica.place.model):
            return True
        plan = planner.plan_at(replica.place)
        if plan.estimate.devices:
            replica.free_bytes = await self._devices.read(plan.engine)
        plan = self._restored(replica, plan)
        replica.attempted = plan.reduced
        reason = shortage(plan.estimate, replica.free_bytes)
        if reason is None:
            return True
        if self._devices.may_grow:
            await asyncio.sleep(_PAUSE_S)
            return False
        # The engine puts fewer layers there, and the others into main memory.
        if plan.estimate.is_fitted and not _exceeds_host(
            planner.plan_at(replica.place, replica.free_bytes).estimate
        ):
            return True
        raise DeviceMemoryShort(f"{plan.model} does not fit now: {reason}", hint=_HINT)

    def _restored(self, replica: Replica, plan: Plan) -> Plan:
        """Plan with all that was given up for want of memory which is free now."""
        planner = replica.planner
        if not planner.reductions.was_short(planner.entry(plan.model)):
            return plan
        whole = planner.unreduced().plan_at(replica.place)
        if shortage(whole.estimate, replica.free_bytes):
            return plan
        planner.reductions.forget(plan.model)
        self._emit("model.restored", model=plan.model, reason="the memory it needs is free again")
        return whole

    def reduce(self, replica: Replica, cause: FailureCause) -> bool:
        """Whether a replica whose start failed is to start again at once, with less."""
        planner, model = replica.planner, replica.place.model
        is_meant = planner.may_reduce(model) and planner.places.trial_at(replica.place) is None
        if cause.code not in OUT_OF_MEMORY or not is_meant:
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

        reduction = next_reduction(
            plan.memory_inputs, reductions.kinds(entry), plan.from_user, is_short
        )
        if reduction is None:
            return False
        was_short = cause.code != _HOST_MEMORY and is_short(plan.estimate)
        reductions.add(entry, reduction, _reason(reduction, cause), was_short=was_short)
        self._report(plan, reduction, cause)
        return True

    def _report(self, plan: Plan, reduction: Reduction, cause: FailureCause) -> None:
        for key, value in reduction.flags.items():
            self._emit(
                "model.reduced",
                model=plan.model,
                key=key,
                before=reduction.before[key],
                after=value,
                reason=cause.sentence,
            )


def _reason(reduction: Reduction, cause: FailureCause) -> str:
    before = ", ".join(
        f"{key} = {value}" for key, value in reduction.before.items() if value is not None
    )
    return f"with {before or 'more'}, {cause.sentence}"


def _exceeds_host(found: Estimate) -> bool:
    here = machine.read()
    reserve_bytes = int(here.memory_bytes * RESERVE_SHARE)
    return found.own_at_start_bytes > here.memory_available_bytes - reserve_bytes
