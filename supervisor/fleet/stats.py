"""The figures of each instance that its state does not tell: speed and memory.

Asked only when somebody looks, at most every 2 s: polling an engine faster disturbs it (its
`/metrics` gauges are reset by each reader, and frequent readers delay its notice of clients that
left). Source: llama-server build 10434, tools/server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.fleet.process_memory import memory_bytes
from supervisor.instance.instance import Instance
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State

_FRESH_S: Final = 2.0
_PATIENCE_S: Final = 0.1
# A single token, as the warm-up asks for, is told to have taken no time at all.
_SPAN_MIN_S: Final = 0.001
_TOKENS: Final = "tokens_predicted_total"
_SECONDS: Final = "tokens_predicted_seconds_total"


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """What was last seen of one process.

    Attributes:
        pid: The process; None before there is one.
        tokens: Tokens decoded since the run began; grows when a request ends.
        decoding_s: Seconds of decoding they took, summed over sequences.
        tokens_per_second: Decoding speed of one sequence since the reading before, or None.
        memory_bytes: Resident memory, or None.
    """

    pid: int | None
    tokens: float = 0
    decoding_s: float = 0
    tokens_per_second: float | None = None
    memory_bytes: int | None = None


class StatsReader:
    """The last reading of every instance."""

    def __init__(self) -> None:
        self._by_name: dict[str, InstanceStats] = {}
        self._read_at_s = float("-inf")

    def of(self, facts: InstanceSnapshot) -> InstanceStats:
        """Return the last reading of an instance's present process."""
        found = self._by_name.get(facts.name)
        return found if found and found.pid == facts.pid else InstanceStats(facts.pid)

    async def refresh(self, instances: Iterable[Instance]) -> None:
        """Read every serving instance again, unless the last reading is fresh."""
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_at_s < _FRESH_S:
            return
        self._read_at_s = now_s
        everyone = [instance.snapshot() for instance in instances]
        self._by_name = {facts.name: self.of(facts) for facts in everyone}
        async with asyncio.TaskGroup() as readers:
            for facts in everyone:
                readers.create_task(self._read(facts))

    async def _read(self, facts: InstanceSnapshot) -> None:
        before = self.of(facts)
        metrics = await _metrics(facts) if facts.state is State.READY else {}
        memory = memory_bytes(facts.pid) if facts.pid else None
        self._by_name[facts.name] = reading(before, metrics, memory)


def reading(
    before: InstanceStats, metrics: Mapping[str, float], memory: int | None
) -> InstanceStats:
    """Return a new reading; the speed stands until something new was decoded."""
    tokens = metrics.get(_TOKENS, before.tokens)
    decoding_s = metrics.get(_SECONDS, before.decoding_s)
    speed = before.tokens_per_second
    if decoding_s - before.decoding_s >= _SPAN_MIN_S:
        speed = (tokens - before.tokens) / (decoding_s - before.decoding_s)
    return InstanceStats(before.pid, tokens, decoding_s, speed, memory)


async def _metrics(facts: InstanceSnapshot) -> Mapping[str, float]:
    try:
        async with (
            EngineClient(facts.endpoint, facts.api_key) as client,
            asyncio.timeout(_PATIENCE_S),
        ):
            found = await client.metrics()
    except (TimeoutError, EngineUnreachable):
        return {}
    return {} if isinstance(found, ErrorResponse) else found
