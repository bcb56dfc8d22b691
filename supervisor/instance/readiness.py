"""When an engine that was spawned is ready for requests."""

from __future__ import annotations

import asyncio
from typing import Final

from supervisor.process.run import ProcessRun

_FIRST_PROBE_S: Final = 0.1
_LAST_PROBE_S: Final = 2.0
# An engine that reported that it listens may still take a moment to answer.
_EAGER_PROBE_S: Final = 0.005


async def wait_healthy(run: ProcessRun) -> None:
    """Probe, less and less often; at once when the engine reports that it listens. No deadline."""
    pause_s = _FIRST_PROBE_S
    while True:
        is_hinted = await _ready_hint_within(run, pause_s)
        if await is_healthy(run):
            return
        pause_s = _EAGER_PROBE_S if is_hinted else min(2 * pause_s, _LAST_PROBE_S)


async def is_healthy(run: ProcessRun) -> bool:
    """Whether the engine answers, and is the one of this run."""
    if not run.endpoint.is_known:
        return False
    async with run.client() as client:
        return await client.is_healthy() and await client.is_ours()


async def _ready_hint_within(run: ProcessRun, pause_s: float) -> bool:
    try:
        async with asyncio.timeout(pause_s):
            await run.ready_hint.wait()
    except TimeoutError:
        return False
    run.ready_hint.clear()
    return True
