"""What is done in each state of an instance, while it lasts.

An activity returns the fact it found, which `instance.py` takes in, or None. It is cancelled when
the state is left, and has no deadline of its own: the state has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.engine_client.client import EngineClient
from supervisor.instance.events import InstanceEvents
from supervisor.instance.health import HealthSettings, has_moved
from supervisor.instance.health_monitor import HealthMonitor
from supervisor.instance.limits import InstanceLimits
from supervisor.instance.slot_persistence import SlotPersister
from supervisor.instance.states import Event, State
from supervisor.instance.traffic import Traffic
from supervisor.process.run import ProcessRun
from supervisor.warmup.prefill import Warmup, warm
from supervisor.warmup.queue import PrefillQueue

_FIRST_PROBE_S: Final = 0.1
_LAST_PROBE_S: Final = 2.0
# An engine that has just said it listens is asked again this soon, should it not be so quite yet.
_EAGER_PROBE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class StateContext:
    """What an activity works with.

    Attributes:
        name: The instance.
        run: Its present run.
        traffic: Who sends it requests.
        limits: How long each state may last.
        events: Who tells what is done.
        keeper: Who keeps its conversations while it is away.
        reading: The prompts that are to be read ahead in this run.
        is_well: Whether it was well when it was last in service.
        is_overdue: Whether it is to leave because it computes for a client that left.
    """

    name: str
    run: ProcessRun
    traffic: Traffic
    limits: InstanceLimits
    events: InstanceEvents
    keeper: SlotPersister
    reading: PrefillQueue
    is_well: bool = True
    is_overdue: bool = False

    @property
    def attendant(self) -> HealthMonitor:
        """Return one who watches the run, knowing nothing of it yet."""
        rules: HealthSettings = self.limits
        if self.is_overdue:  # its processor time shows the work that nobody wants
            rules = rules.model_copy(update={"batch_timeout_s": 0})
        return HealthMonitor(self.name, self.run, self.traffic, rules, self.keeper)

    def client(self) -> EngineClient:
        """Return a client of the engine."""
        return EngineClient(self.run.endpoint, self.run.launch.api_key)


async def wait_healthy(context: StateContext) -> Event:
    """Look until the engine can serve: after 100 ms, doubling, or at once when it says so."""
    # In vain, but it has the HTTP client's parts imported while the engine is busy loading: they
    # take 40 ms the first time, which would otherwise be added to the time until ready.
    await _is_up(context.run)
    pause_s = _FIRST_PROBE_S
    while True:
        told = await _told_within(context.run, pause_s)
        if await _is_up(context.run):
            return Event.HEALTHY
        pause_s = _EAGER_PROBE_S if told else min(2 * pause_s, _LAST_PROBE_S)


async def warm_up(context: StateContext) -> Event:
    """Have one token made, put conversations back, read prompts ahead, in this order.

    An engine that cannot make a token now is unhealthy.
    """
    async with context.client() as client:
        match await warm(client):
            case Warmup.FAILED:
                return Event.UNHEALTHY
            case Warmup.WARM:
                restored = await context.keeper.restore(client, context.run.number)
                await context.reading.begin(client, restored)
            case Warmup.NOTHING_TO_WARM:
                pass
    return Event.WARMED


async def monitor(context: StateContext) -> Event:
    """See that what the engine has to do goes on; meanwhile do what is left for idle times."""
    async with asyncio.TaskGroup() as beside:
        left = beside.create_task(_use_idle_times(context))
        await context.attendant.watch()
        left.cancel()
    return Event.UNHEALTHY


async def wait_recovered(context: StateContext) -> Event:
    """Look, more and more rarely, until the engine is well again.

    One that still holds requests must go on with them; any other must make a token. Health alone
    is no proof: an engine whose decoding hangs answers that it is well.
    """
    attendant = context.attendant
    before = await attendant.sample()
    pause_s = _FIRST_PROBE_S
    while True:
        await asyncio.sleep(pause_s)
        now = await attendant.sample()
        if has_moved(before, now) if now.awaited else await _can_answer(context.run):
            return Event.HEALTHY
        before, pause_s = now, min(2 * pause_s, _LAST_PROBE_S)


async def drain(context: StateContext) -> Event:
    """Wait until the instance holds no request, or nothing moves in those it holds.

    What its slots hold is saved then, unless it was unhealthy or is overdue: it may not answer.
    """
    async with asyncio.TaskGroup() as ends:
        idle = ends.create_task(context.traffic.wait_idle(context.name))
        still = ends.create_task(context.attendant.watch())
        await asyncio.wait((idle, still), return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            context.events.drained(context.run.number)
        idle.cancel()
        still.cancel()
    is_saved = context.is_well and not context.is_overdue
    if idle.done() and not idle.cancelled() and is_saved:
        async with context.client() as client:
            await context.keeper.save(client, context.run.number)
    return Event.DRAINED


async def stop(context: StateContext) -> None:
    """Cut what is left, ask the engine to leave, and ask again at half the time.

    The order matters: an engine with a connection open does not exit until that is closed.
    """
    run = context.run
    if held := context.traffic.activity(context.name).in_flight:
        context.events.cut(run.number, held)
    await context.traffic.close(context.name)
    if how := run.request_exit():
        context.events.asked(run.number, how)
    await asyncio.sleep(context.limits.stop_timeout_s / 2)
    run.terminate()
    context.events.asked(run.number, "SIGTERM again")


async def kill(context: StateContext) -> None:
    """Kill the engine and its group."""
    context.run.kill()
    context.events.asked(context.run.number, "SIGKILL")


async def _told_within(run: ProcessRun, pause_s: float) -> bool:
    """Wait for the engine's own word, or as long as the pause; return whether it came."""
    try:
        async with asyncio.timeout(pause_s):
            await run.ready_hint.wait()
    except TimeoutError:
        return False
    run.ready_hint.clear()
    return True


async def _use_idle_times(context: StateContext) -> None:
    async with context.client() as client:
        await context.reading.resume(client, context.traffic, context.name)


async def _can_answer(run: ProcessRun) -> bool:
    if not await _is_up(run):
        return False
    async with EngineClient(run.endpoint, run.launch.api_key) as client:
        return await warm(client) is not Warmup.FAILED


async def _is_up(run: ProcessRun) -> bool:
    if not run.endpoint.is_known:
        return False
    async with EngineClient(run.endpoint, run.launch.api_key) as client:
        return await client.is_healthy() and await client.is_ours()


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
