"""Attends to an engine in service: takes the readings that `liveness` decides over.

A probe is counted as a request of our own while it runs, so that one slow token is judged by the
same rules as anybody's: an engine that computes on a crowded machine is not blamed for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from supervisor.life.keep import Keeper
from supervisor.life.liveness import Look, Need, Reading, Rules, begin, judge, observe
from supervisor.life.llama import EngineSilent, Llama, Refused
from supervisor.life.run import Run
from supervisor.life.traffic import Traffic
from supervisor.life.warm import Warmth, warm

_COUNTERS: Final = (
    "n_decode_total",
    "prompt_tokens_total",
    "tokens_predicted_total",
    "requests_processing",
)


class Attendant:
    """Watches one run of an engine.

    Args:
        name: The instance.
        run: Its run, which serves.
        traffic: Who sends it requests.
        rules: How closely it is watched.
        keeper: Saves what its slots hold before a probe takes one of them.
    """

    def __init__(self, name: str, run: Run, traffic: Traffic, rules: Rules, keeper: Keeper) -> None:
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
        """Return when the engine is unwell; without limit before."""
        vigil = begin(self._read())
        async with asyncio.TaskGroup() as probes:
            while (need := judge(self._rules, vigil)) is not Need.WITHDRAW and not self._is_refused:
                if need is Need.PROBE and (self._probe is None or self._probe.done()):
                    self._probe = probes.create_task(self._ask_for_a_token())
                look = await self._look() if need is Need.LOOK else None
                if look is None:
                    await asyncio.sleep(self._rules.tick_s)
                vigil = observe(self._rules, vigil, self._read(look))
            if self._probe:
                self._probe.cancel()

    async def examine(self) -> Reading:
        """Take one reading, with a look."""
        return self._read(await self._look())

    async def _look(self) -> Look:
        """Ask the engine for its counters, and the system for its processor time."""
        try:
            async with asyncio.timeout(2 * self._rules.tick_s), self._llama() as llama:
                metrics = await llama.metrics()
        except (TimeoutError, EngineSilent):
            return Look(None, self._run.cpu_s())
        return Look(_counters(metrics), self._run.cpu_s())

    def _read(self, look: Look | None = None) -> Reading:
        pulse = self._traffic.pulse(self._name)
        return Reading(
            asyncio.get_running_loop().time(),
            pulse.awaited + self._is_probing,
            pulse.bytes_seen + self._probes_answered,
            look,
            pulse.is_silent,
        )

    async def _ask_for_a_token(self) -> None:
        async with self._llama() as llama:
            # An engine that does not match prompts gives the probe the slot that was unused for
            # longest: as many probes as there are slots would leave nothing to be saved.
            await self._keeper.save(llama, self._run.number)
            self._is_probing = True
            self._is_refused = await warm(llama) is Warmth.SICK
            self._is_probing = False
        self._probes_answered += 1

    def _llama(self) -> Llama:
        return Llama(self._run.endpoint, self._run.launch.api_key)


def _counters(metrics: Mapping[str, float] | Refused) -> tuple[float, ...] | None:
    if isinstance(metrics, Refused):
        return None
    return tuple(metrics.get(name, 0.0) for name in _COUNTERS)
