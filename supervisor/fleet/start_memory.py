"""Device memory of an instance that starts: is it there, and what is given up if it was not."""

from __future__ import annotations

import asyncio
from typing import Final

from supervisor.errors import CorralError, DeviceMemoryShort
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.fleet.device_memory import DeviceMemory
from supervisor.fleet.model import Replica
from supervisor.host import machine
from supervisor.memory.estimate import Estimate
from supervisor.memory.fit import RESERVE_SHARE
from supervisor.memory.reduction import Reduction, next_reduction
from supervisor.memory.shortage import shortage
from supervisor.process.exit_cause import FailureCause

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
            return _is_short(replica, found, cause)

        one = next_reduction(plan.memory_inputs, reductions.kinds(entry), plan.from_user, is_short)
        if one is None:
            return False
        was_short = cause.code != _HOST_MEMORY and is_short(plan.estimate)
        reductions.add(entry, one, _reason(one, cause), was_short=was_short)
        self._report(plan, one, cause)
        return True

    def _report(self, plan: Plan, one: Reduction, cause: FailureCause) -> None:
        for key, value in one.flags.items():
            self._emit(
                "model.reduced",
                model=plan.model,
                key=key,
                before=one.before[key],
                after=value,
                reason=cause.sentence,
            )


def _reason(one: Reduction, cause: FailureCause) -> str:
    before = ", ".join(f"{key} = {value}" for key, value in one.before.items() if value is not None)
    return f"with {before or 'more'}, {cause.sentence}"


def _is_short(replica: Replica, found: Estimate, cause: FailureCause) -> bool:
    """Whether an instance is known not to find what it needs of the memory that was full."""
    if cause.code != _HOST_MEMORY:
        return shortage(found, replica.free_bytes) is not None
    return _exceeds_host(found)


def _exceeds_host(found: Estimate) -> bool:
    here = machine.read()
    reserve_bytes = int(here.memory_bytes * RESERVE_SHARE)
    return found.own_at_start_bytes > here.memory_available_bytes - reserve_bytes
