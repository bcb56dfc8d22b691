"""What is done in each state of an instance, while it lasts.

An activity returns the fact it found, which `instance.py` takes in, or None. It is cancelled when
the state is left, and has no deadline of its own: the state has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from supervisor.life.attend import Attendant
from supervisor.life.facts import Limits
from supervisor.life.keep import Keeper
from supervisor.life.lifecycle import Event, State
from supervisor.life.liveness import has_moved
from supervisor.life.llama import Llama
from supervisor.life.reading import Reading
from supervisor.life.run import Run
from supervisor.life.traffic import Traffic
from supervisor.life.voice import Voice
from supervisor.life.warm import Warmth, warm
from supervisor.life.weighing import Weighing

_FIRST_PROBE_S: Final = 0.1
_LAST_PROBE_S: Final = 2.0
# An engine that has just said it listens is asked again this soon, should it not be so quite yet.
_EAGER_PROBE_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Stage:
    """What an activity works with.

    Attributes:
        name: The instance.
        run: Its present run.
        traffic: Who sends it requests.
        limits: How long each state may last.
        voice: Who tells what is done.
        keeper: Who keeps its conversations while it is away.
        reading: The prompts that are to be read ahead in this run.
        weighing: What guessing tokens ahead brings in this run.
        is_well: Whether it was well when it was last in service.
        is_overdue: Whether it is to leave because it computes for a client that left.
    """

    name: str
    run: Run
    traffic: Traffic
    limits: Limits
    voice: Voice
    keeper: Keeper
    reading: Reading
    weighing: Weighing
    is_well: bool = True
    is_overdue: bool = False

    @property
    def attendant(self) -> Attendant:
        """Return one who watches the run, knowing nothing of it yet."""
        rules = self.limits.liveness
        if self.is_overdue:  # its processor time shows the work that nobody wants
            rules = replace(rules, batch_s=0)
        return Attendant(self.name, self.run, self.traffic, rules, self.keeper)

    def llama(self) -> Llama:
        """Return a client of the engine."""
        return Llama(self.run.endpoint, self.run.launch.api_key)


async def watch(stage: Stage) -> Event:
    """Look until the engine can serve: after 100 ms, doubling, or at once when it says so."""
    # In vain, but it has the HTTP client's parts imported while the engine is busy loading: they
    # take 40 ms the first time, which would otherwise be added to the time until ready.
    await _is_up(stage.run)
    pause_s = _FIRST_PROBE_S
    while True:
        told = await _told_within(stage.run, pause_s)
        if await _is_up(stage.run):
            return Event.HEALTHY
        pause_s = _EAGER_PROBE_S if told else min(2 * pause_s, _LAST_PROBE_S)


async def warm_up(stage: Stage) -> Event:
    """Have one token made, put conversations back, read prompts ahead, in this order.

    An engine that cannot make a token now is unwell.
    """
    async with stage.llama() as llama:
        match await warm(llama):
            case Warmth.SICK:
                return Event.UNHEALTHY
            case Warmth.WARM:
                restored = await stage.keeper.restore(llama, stage.run.number)
                await stage.reading.begin(llama, restored)
            case Warmth.NOTHING_TO_WARM:
                pass
    return Event.WARMED


async def attend(stage: Stage) -> Event:
    """See that what the engine has to do goes on; meanwhile do what is left for idle times."""
    async with asyncio.TaskGroup() as beside:
        left = beside.create_task(_use_idle_times(stage))
        await stage.attendant.watch()
        left.cancel()
    return Event.UNHEALTHY


async def heal(stage: Stage) -> Event:
    """Look, more and more rarely, until the engine is well again.

    One that still holds requests must go on with them; any other must make a token. Health alone
    is no proof: an engine whose decoding hangs answers that it is well.
    """
    attendant = stage.attendant
    before = await attendant.examine()
    pause_s = _FIRST_PROBE_S
    while True:
        await asyncio.sleep(pause_s)
        now = await attendant.examine()
        if has_moved(before, now) if now.awaited else await _can_answer(stage.run):
            return Event.HEALTHY
        before, pause_s = now, min(2 * pause_s, _LAST_PROBE_S)


async def drain(stage: Stage) -> Event:
    """Wait until the instance holds no request, or nothing moves in those it holds.

    What its slots hold is saved then, unless it was unwell or is overdue: it may not answer.
    """
    async with asyncio.TaskGroup() as ends:
        idle = ends.create_task(stage.traffic.idle(stage.name))
        still = ends.create_task(stage.attendant.watch())
        await asyncio.wait((idle, still), return_when=asyncio.FIRST_COMPLETED)
        if idle.done():
            stage.voice.drained(stage.run.number)
        idle.cancel()
        still.cancel()
    is_saved = stage.is_well and not stage.is_overdue
    if idle.done() and not idle.cancelled() and is_saved:
        async with stage.llama() as llama:
            await stage.keeper.save(llama, stage.run.number)
    return Event.DRAINED


async def leave(stage: Stage) -> None:
    """Cut what is left, ask the engine to leave, and ask again at half the time.

    The order matters: an engine with a connection open does not exit until that is closed.
    """
    run = stage.run
    if held := stage.traffic.pulse(stage.name).in_flight:
        stage.voice.cut(run.number, held)
    await stage.traffic.close(stage.name)
    if how := run.ask_to_leave():
        stage.voice.asked(run.number, how)
    await asyncio.sleep(stage.limits.stop_timeout_s / 2)
    run.insist()
    stage.voice.asked(run.number, "SIGTERM again")


async def kill(stage: Stage) -> None:
    """Kill the engine and its group."""
    stage.run.kill()
    stage.voice.asked(stage.run.number, "SIGKILL")


async def _told_within(run: Run, pause_s: float) -> bool:
    """Wait for the engine's own word, or as long as the pause; return whether it came."""
    try:
        async with asyncio.timeout(pause_s):
            await run.told.wait()
    except TimeoutError:
        return False
    run.told.clear()
    return True


async def _use_idle_times(stage: Stage) -> None:
    """Read what prompts are left, then weigh what guessing brings."""
    async with stage.llama() as llama:
        await stage.reading.go_on(llama, stage.traffic, stage.name)
        every_s = stage.limits.liveness.interval_s
        await stage.weighing.go_on(llama, stage.traffic, stage.name, every_s)


async def _can_answer(run: Run) -> bool:
    if not await _is_up(run):
        return False
    async with Llama(run.endpoint, run.launch.api_key) as llama:
        return await warm(llama) is not Warmth.SICK


async def _is_up(run: Run) -> bool:
    if not run.endpoint.is_known:
        return False
    async with Llama(run.endpoint, run.launch.api_key) as llama:
        return await llama.is_healthy() and await llama.is_ours()


Activity = Callable[[Stage], Awaitable[Event | None]]

ACTIVITIES: Final[Mapping[State, Activity]] = MappingProxyType(
    {
        State.STARTING: watch,
        State.WARMING: warm_up,
        State.READY: attend,
        State.UNWELL: heal,
        State.DRAINING: drain,
        State.STOPPING: leave,
        State.KILLING: kill,
    }
)
