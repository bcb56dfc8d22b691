"""Watches an engine in service: takes the samples that `health` decides over."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from supervisor.engine_client.client import EngineUnreachable, ErrorResponse
from supervisor.instance.health import (
    CounterSample,
    HealthAction,
    HealthSample,
    HealthSettings,
    next_action,
    start,
    update,
)
from supervisor.instance.interfaces import SlotPersister, Traffic
from supervisor.process.run import ProcessRun
from supervisor.warmup.prefill import Warmup, warm

_COUNTERS: Final = (
    "n_decode_total",
    "prompt_tokens_total",
    "tokens_predicted_total",
    "requests_processing",
)


class HealthMonitor:
    """Watches one run of an engine.

    Args:
        name: The instance.
        persister: Saves the slots before a probe overwrites one.
    """

    def __init__(
        self,
        name: str,
        run: ProcessRun,
        traffic: Traffic,
        settings: HealthSettings,
        persister: SlotPersister,
    ) -> None:
        self._name = name
        self._run = run
        self._traffic = traffic
        self._settings = settings
        self._persister = persister
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
            ) is not HealthAction.WITHDRAW and not self._is_refused:
                if action is HealthAction.PROBE and (self._probe is None or self._probe.done()):
                    self._probe = probes.create_task(self._generate_token())
                counters = await self._counters() if action is HealthAction.READ_COUNTERS else None
                if counters is None:
                    await asyncio.sleep(self._settings.tick_s)
                sample = self._sample(counters)
                if action is HealthAction.LOOK_AT_PROCESS:
                    sample = replace(sample, is_suspended=self._run.is_suspended())
                health = update(self._settings, health, sample)
            if self._probe:
                self._probe.cancel()

    async def sample(self) -> HealthSample:
        """Take a sample that includes the engine's counters."""
        return self._sample(await self._counters())

    async def _counters(self) -> CounterSample:
        try:
            async with asyncio.timeout(2 * self._settings.tick_s), self._run.client() as client:
                metrics = await client.metrics()
        except (TimeoutError, EngineUnreachable):
            return CounterSample(None, self._run.cpu_s())
        return CounterSample(_selected(metrics), self._run.cpu_s())

    def _sample(self, counters: CounterSample | None = None) -> HealthSample:
        # A probe counts as a request, so that one slow token on a busy machine is judged by the
        # same rules as any other.
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
            # An engine that does not match prompts gives the probe the least recently used slot:
            # as many probes as there are slots would overwrite all of them.
            await self._persister.save(client, self._run.number)
            self._is_probing = True
            self._is_refused = await warm(client) is Warmup.FAILED
            self._is_probing = False
        self._probes_answered += 1


def _selected(metrics: Mapping[str, float] | ErrorResponse) -> tuple[float, ...] | None:
    if isinstance(metrics, ErrorResponse):
        return None
    return tuple(metrics.get(name, 0.0) for name in _COUNTERS)
