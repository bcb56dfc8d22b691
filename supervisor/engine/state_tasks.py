"""The work of each state of an instance, as one task: readiness, warm-up, monitoring, drain, stop.

A task returns an event, which `instance.py` applies, or None. It is cancelled when the instance
leaves the state, and has no deadline: the state has one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.health import (
    CounterSample,
    HealthSample,
    has_moved,
    next_action,
    start,
    update,
)
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.run import ProcessRun
from supervisor.engine.states import Event, State
from supervisor.engine.warmup import PrefillQueue, warm
from supervisor.events import Emit
from supervisor.settings.tables import HealthSettings, InstanceLimits

if TYPE_CHECKING:
    from proxy.router.router import Router


class SlotPersister(Protocol):
    """Saves and restores KV slots. Neither call raises for an error of the engine."""

    async def restore(self, client: EngineClient, run: int, /) -> int:
        """Restore slots of an engine that serves no requests yet; return how many."""

    def has_prompt(self, prompt: WarmPrompt, /) -> bool:
        """Return whether requests that begin with this prompt can continue from a slot file."""

    async def save(self, client: EngineClient, run: int, /) -> object:
        """Save the idle slots that are not saved yet, within a separate time limit."""


# Measures a run, by its number, before it serves; returns whether another one with other flags must
# follow.
NeedsRestart = Callable[[EngineClient, int], Awaitable[bool]]


_FIRST_PROBE_S: Final = 0.1
_LAST_PROBE_S: Final = 2.0
# An engine that reported that it listens may still take a moment to answer.
_EAGER_PROBE_S: Final = 0.005


async def wait_healthy(run: ProcessRun, first_probe_s: float = _FIRST_PROBE_S) -> None:
    """Probe at growing intervals, and when the engine reports that it listens. No deadline."""
    pause_s = first_probe_s
    while True:
        is_hinted = False
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                is_hinted = await run.ready_hint.wait()
        if is_hinted:
            run.ready_hint.clear()
        if await is_healthy(run):
            return
        pause_s = _EAGER_PROBE_S if is_hinted else min(2 * pause_s, _LAST_PROBE_S)


async def is_healthy(run: ProcessRun) -> bool:
    if not run.endpoint.is_known:
        return False
    async with run.client() as client:
        return await client.is_healthy() and await client.is_ours()


_COUNTERS: Final = (
    "n_decode_total",
    "prompt_tokens_total",
    "tokens_predicted_total",
    "requests_processing",
)


class HealthMonitor:
    """Watches one run; saves the slots before a probe overwrites one of them."""

    def __init__(self, context: StateContext) -> None:
        self._name, self._run = context.name, context.run
        self._traffic, self._persister = context.traffic, context.persister
        self._settings: HealthSettings = context.limits
        if context.is_overdue:  # its CPU time is the abandoned request's
            self._settings = context.limits.model_copy(update={"batch_timeout_s": 0})
        self._probe: asyncio.Task[None] | None = None
        self._is_probing = False
        self._probes_answered = 0
        self._is_refused = False

    async def watch(self) -> None:
        """Return when the engine is unhealthy."""
        health = start(self._sample())
        async with asyncio.TaskGroup() as probes:
            while (
                action := next_action(self._settings, health)
            ) != "withdraw" and not self._is_refused:
                if action == "probe" and (self._probe is None or self._probe.done()):
                    self._probe = probes.create_task(self._generate_token())
                counters = await self._counters() if action == "read counters" else None
                if counters is None:
                    await asyncio.sleep(self._settings.tick_s)
                sample = self._sample(counters)
                if action == "look at process":
                    sample = replace(sample, is_suspended=self._run.is_suspended())
                health = update(self._settings, health, sample)
            if self._probe:
                self._probe.cancel()

    async def sample(self) -> HealthSample:
        return self._sample(await self._counters())

    async def _counters(self) -> CounterSample:
        counters = None
        with suppress(TimeoutError, EngineUnreachable):
            async with asyncio.timeout(2 * self._settings.tick_s), self._run.client() as client:
                metrics = await client.read_metrics()
            if not isinstance(metrics, ErrorResponse):
                counters = tuple(metrics.get(name, 0.0) for name in _COUNTERS)
        return counters, self._run.processor_time()

    def _sample(self, counters: CounterSample | None = None) -> HealthSample:
        # A probe counts as a request, so that its slow token on a busy machine is judged by the
        # same rules as a client's.
        activity = self._traffic.activity(self._name)
        return HealthSample(
            asyncio.get_running_loop().time(),
            activity.awaiting_upstream + self._is_probing,
            activity.bytes_received + self._probes_answered,
            counters,
            activity.is_silent,
        )

    async def _generate_token(self) -> None:
        async with self._run.client() as client:
            # An engine that does not match prompts gives the probe the least recently used slot, so
            # probes would overwrite all slots one after another.
            await self._persister.save(client, self._run.number)
            self._is_probing = True
            self._traffic.note_task(self._name)
            self._is_refused = await warm(client) == "failed"
            self._is_probing = False
            self._traffic.note_task(self._name)  # a turn may have asked before the probe had a slot
        self._probes_answered += 1


_TICK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class StateContext:
    """Arguments of the tasks of one run."""

    name: str  # the instance
    run: ProcessRun
    traffic: Router
    limits: InstanceLimits
    emit: Emit
    persister: SlotPersister
    needs_restart: NeedsRestart
    prefills: PrefillQueue  # the prompts to prefill in this run
    was_healthy: bool = True  # whether the instance was healthy when it was last in service
    # Whether it must exit because it computes for a client that disconnected.
    is_overdue: bool = False


async def _wait_in_start(context: StateContext) -> Event:
    await wait_healthy(context.run)
    return Event.HEALTHY


async def warm_up(context: StateContext) -> Event:
    """Generate one token, measure the speed, restore slots, prefill prompts, in this order."""
    async with context.run.client() as client:
        match await warm(client):
            case "failed":
                return Event.UNHEALTHY
            case "warm":
                if await context.needs_restart(client, context.run.number):
                    return Event.MEASURED
                restored = await context.persister.restore(client, context.run.number)
                await context.prefills.begin(client, restored)
            case "nothing to warm":
                pass
    return Event.WARMED


async def monitor(context: StateContext) -> Event:
    """Watch the engine; while it is idle, prefill the remaining prompts."""
    async with asyncio.TaskGroup() as group:
        background = group.create_task(_prefill_while_idle(context))
        await HealthMonitor(context).watch()
        background.cancel()
    return Event.UNHEALTHY


async def wait_recovered(context: StateContext) -> Event:
    """Probe at growing intervals until the engine is healthy again.

    An engine with requests must make progress with them; an idle one must generate a token.
    `/health` proves nothing: it is 200 while decoding hangs.
    """
    health = HealthMonitor(context)
    before = await health.sample()
    pause_s = _FIRST_PROBE_S
    while True:
        await asyncio.sleep(pause_s)
        now = await health.sample()
        if has_moved(before, now) if now.awaited else await _can_generate(context.run):
            return Event.HEALTHY
        before, pause_s = now, min(2 * pause_s, _LAST_PROBE_S)


async def drain(context: StateContext) -> Event:
    """Wait until no request is in flight, or those in flight make no progress; save the slots."""
    async with asyncio.TaskGroup() as group:
        idle = group.create_task(context.traffic.wait_idle(context.name))
        stuck = group.create_task(HealthMonitor(context).watch())
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

    Other instances can then continue from them while this one still answers. An unhealthy or
    overdue engine may not answer, so its slots are not saved.
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
    """Abort requests in flight and request the exit; repeat that after half of the limit."""
    run, emit = context.run, context.emit
    if in_flight := context.traffic.activity(context.name).in_flight:
        emit("instance.requests_aborted", run=run.number, in_flight=in_flight)
    # First, because an engine does not exit while a connection is open.
    await context.traffic.close(context.name)
    if run.is_suspended():  # it obeys no other signal
        await kill(context)
        return
    if how := run.request_exit():
        emit("instance.exit_requested", run=run.number, how=how)
    await asyncio.sleep(context.limits.stop_timeout_s / 2)
    emit("instance.exit_requested", run=run.number, how=f"{run.terminate()} again")


async def kill(context: StateContext) -> None:
    context.run.kill()
    context.emit("instance.exit_requested", run=context.run.number, how="SIGKILL")


async def _prefill_while_idle(context: StateContext) -> None:
    async with context.run.client() as client:
        await context.prefills.resume(client, context.traffic, context.name)


async def _can_generate(run: ProcessRun) -> bool:
    if not await is_healthy(run):
        return False
    async with run.client() as client:
        return await warm(client) != "failed"


StateTask = Callable[[StateContext], Awaitable[Event | None]]

STATE_TASKS: Final[Mapping[State, StateTask]] = {
    State.STARTING: _wait_in_start,
    State.WARMING: warm_up,
    State.READY: monitor,
    State.UNHEALTHY: wait_recovered,
    State.DRAINING: drain,
    State.STOPPING: stop,
    State.KILLING: kill,
}
