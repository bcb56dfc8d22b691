"""Attends to an engine in service: takes the readings that `liveness` decides over.

A probe is counted as a request of our own while it runs, so that one slow token is judged by the
same rules as anybody's: an engine that computes on a crowded machine is not blamed for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.instance.health import (
    CounterSample,
    HealthAction,
    HealthSample,
    HealthSettings,
    next_action,
    start,
    update,
)
from supervisor.instance.slot_persistence import SlotPersister
from supervisor.instance.traffic import Traffic
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
        run: Its run, which serves.
        traffic: Who sends it requests.
        rules: How closely it is watched.
        keeper: Saves what its slots hold before a probe takes one of them.
    """

    def __init__(
        self,
        name: str,
        run: ProcessRun,
        traffic: Traffic,
        rules: HealthSettings,
        keeper: SlotPersister,
    ) -> None:
        self._name = name
        self._run = run
        self._traffic = traffic
        self._rules = rules
        self._keeper = keeper
        self._probe: asyncio.Task[None] | None = None
        self._is_probing = False
        self._probes_answered = 0
        self._is_refused = False

    async def watch(self) -> None:
        """Return when the engine is unhealthy; without limit before."""
        health = start(self._read())
        async with asyncio.TaskGroup() as probes:
            while (
                need := next_action(self._rules, health)
            ) is not HealthAction.WITHDRAW and not self._is_refused:
                if need is HealthAction.PROBE and (self._probe is None or self._probe.done()):
                    self._probe = probes.create_task(self._ask_for_a_token())
                look = await self._look() if need is HealthAction.LOOK else None
                if look is None:
                    await asyncio.sleep(self._rules.tick_s)
                health = update(self._rules, health, self._read(look))
            if self._probe:
                self._probe.cancel()

    async def sample(self) -> HealthSample:
        """Take one reading, with a look."""
        return self._read(await self._look())

    async def _look(self) -> CounterSample:
        """Ask the engine for its counters, and the system for its processor time."""
        try:
            async with asyncio.timeout(2 * self._rules.tick_s), self._client() as client:
                metrics = await client.metrics()
        except (TimeoutError, EngineUnreachable):
            return CounterSample(None, self._run.cpu_s())
        return CounterSample(_counters(metrics), self._run.cpu_s())

    def _read(self, look: CounterSample | None = None) -> HealthSample:
        pulse = self._traffic.activity(self._name)
        return HealthSample(
            asyncio.get_running_loop().time(),
            pulse.awaited + self._is_probing,
            pulse.bytes_seen + self._probes_answered,
            look,
            pulse.is_silent,
        )

    async def _ask_for_a_token(self) -> None:
        async with self._client() as client:
            # An engine that does not match prompts gives the probe the slot that was unused for
            # longest: as many probes as there are slots would leave nothing to be saved.
            await self._keeper.save(client, self._run.number)
            self._is_probing = True
            self._is_refused = await warm(client) is Warmup.FAILED
            self._is_probing = False
        self._probes_answered += 1

    def _client(self) -> EngineClient:
        return EngineClient(self._run.endpoint, self._run.launch.api_key)


def _counters(metrics: Mapping[str, float] | ErrorResponse) -> tuple[float, ...] | None:
    if isinstance(metrics, ErrorResponse):
        return None
    return tuple(metrics.get(name, 0.0) for name in _COUNTERS)
