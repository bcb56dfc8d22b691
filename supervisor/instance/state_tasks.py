"""The work of each state of an instance, as one task.

A task returns the event it found, which `instance.py` applies, or None. It is cancelled when the
state is left, and has no deadline: the state has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.events import Emit
from supervisor.instance import readiness
from supervisor.instance.health import HealthSettings, has_moved
from supervisor.instance.health_monitor import HealthMonitor
from supervisor.instance.interfaces import Calibrator, SlotPersister, Traffic
from supervisor.instance.limits import InstanceLimits
from supervisor.instance.states import Event, State
from supervisor.process.run import ProcessRun
from supervisor.warmup.prefill import Warmup, warm
from supervisor.warmup.queue import PrefillQueue

_FIRST_PROBE_S: Final = 0.1
_LAST_PROBE_S: Final = 2.0
_TICK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class StateContext:
    """What the tasks of one run work with.

    Attributes:
        name: The instance.
        prefills: The prompts to prefill in this run.
        was_healthy: Whether it was healthy when it was last in service.
        is_overdue: Whether it is to exit because it computes for a client that disconnected.
    """

    name: str
    run: ProcessRun
    traffic: Traffic
    limits: InstanceLimits
    emit: Emit
    persister: SlotPersister
    calibrator: Calibrator
    prefills: PrefillQueue
    was_healthy: bool = True
    is_overdue: bool = False

    def monitor(self) -> HealthMonitor:
        settings: HealthSettings = self.limits
        if self.is_overdue:  # its CPU time is the abandoned request's
            settings = settings.model_copy(update={"batch_timeout_s": 0})
        return HealthMonitor(self.name, self.run, self.traffic, settings, self.persister)


async def wait_healthy(context: StateContext) -> Event:
    await readiness.wait_healthy(context.run)
    return Event.HEALTHY


async def warm_up(context: StateContext) -> Event:
    """Generate one token, measure the speed, restore slots, prefill prompts, in this order."""
    async with context.run.client() as client:
        match await warm(client):
            case Warmup.FAILED:
                return Event.UNHEALTHY
            case Warmup.WARM:
                if await context.calibrator.needs_restart(client, context.run.number):
                    return Event.MEASURED
                restored = await context.persister.restore(client, context.run.number)
                await context.prefills.begin(client, restored)
            case Warmup.NOTHING_TO_WARM:
                pass
    return Event.WARMED


async def monitor(context: StateContext) -> Event:
    """Watch the engine; while it is idle, prefill the remaining prompts."""
    async with asyncio.TaskGroup() as group:
        background = group.create_task(_use_idle_time(context))
        await context.monitor().watch()
        background.cancel()
    return Event.UNHEALTHY


async def wait_recovered(context: StateContext) -> Event:
    """Probe, less and less often, until the engine is healthy again.

    An engine with requests must make progress with them; any other must generate a token. `/health`
    proves nothing: it is 200 while decoding hangs.
    """
    health = context.monitor()
    before = await health.sample()
    pause_s = _FIRST_PROBE_S
    while True:
        await asyncio.sleep(pause_s)
        now = await health.sample()
        if has_moved(before, now) if now.awaited else await _generates(context.run):
            return Event.HEALTHY
        before, pause_s = now, min(2 * pause_s, _LAST_PROBE_S)


async def drain(context: StateContext) -> Event:
    """Wait until no request is in flight, or those in flight make no progress; save the slots."""
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(context.traffic.wait_idle(context.name))
        stuck = group.create_task(context.monitor().watch())
        saving = group.create_task(_save_as_requests_end(context))
        await asyncio.wait((idle, stuck), return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            context.emit("instance.drained", run=context.run.number)
            stuck.cancel()
            await asyncio.wait((saving,))  # it has a limit
        for task in (idle, stuck, saving):
            task.cancel()
    return Event.DRAINED


async def _save_as_requests_end(context: StateContext) -> None:
    """Save the idle slots now, and again when requests have ended, until none is in flight.

    So that other instances go on from them while this one still answers. An unhealthy or overdue
    engine may not answer, so nothing of it is saved.
    """
    if not context.was_healthy or context.is_overdue:
        return
    async with context.run.client() as client:
        in_flight = -1
        while in_flight:
            now = context.traffic.activity(context.name).in_flight
            if now == in_flight:
                await asyncio.sleep(_TICK_S)
                continue
            in_flight = now
            await context.persister.save(client, context.run.number)


async def stop(context: StateContext) -> None:
    """Abort what is in flight, request the exit, and repeat it after half of the limit."""
    run, emit = context.run, context.emit
    if in_flight := context.traffic.activity(context.name).in_flight:
        emit("instance.requests_aborted", run=run.number, in_flight=in_flight)
    # First, because an engine does not exit while a connection is open.
    await context.traffic.close(context.name)
    if run.is_suspended():  # it obeys nothing else
        await kill(context)
        return
    if how := run.request_exit():
        emit("instance.exit_requested", run=run.number, how=how)
    await asyncio.sleep(context.limits.stop_timeout_s / 2)
    run.terminate()
    emit("instance.exit_requested", run=run.number, how="SIGTERM again")


async def kill(context: StateContext) -> None:
    context.run.kill()
    context.emit("instance.exit_requested", run=context.run.number, how="SIGKILL")


async def _use_idle_time(context: StateContext) -> None:
    async with context.run.client() as client:
        await context.prefills.resume(client, context.traffic, context.name)


async def _generates(run: ProcessRun) -> bool:
    if not await readiness.is_healthy(run):
        return False
    async with run.client() as client:
        return await warm(client) is not Warmup.FAILED


StateTask = Callable[[StateContext], Awaitable[Event | None]]

STATE_TASKS: Final[Mapping[State, StateTask]] = MappingProxyType(
    {
        State.STARTING: wait_healthy,
        State.WARMING: warm_up,
        State.READY: monitor,
        State.UNHEALTHY: wait_recovered,
        State.DRAINING: drain,
        State.STOPPING: stop,
        State.KILLING: kill,
    }
)
