"""Speed, draft acceptance and memory of each instance, read on request and at most every 2 s.

Polling an engine faster disturbs it: each read of `/metrics` resets its gauges, and frequent reads
delay its notice of clients that disconnect. Source: llama-server build 10434, tools/server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import psutil

from proxy.observe.metrics import waited_ms
from supervisor.engine.instance import Instance
from supervisor.engine.states import InstanceSnapshot, State


def memory_bytes(pid: int) -> int | None:
    """Return a process's resident memory, shared pages of its model included; None if unknown."""
    return _memory(pid)[0]


def own_bytes(pid: int) -> int | None:
    """Return resident memory, without mapped files if the system tells; None if unknown."""
    return _memory(pid)[1]


def _memory(pid: int) -> tuple[int | None, int | None]:
    try:
        found = psutil.Process(pid).memory_info()
    except (psutil.Error, OSError):
        return None, None
    return found.rss, found.rss - getattr(found, "shared", 0)


ReadEngines = Callable[[float], Awaitable[Mapping[str, Mapping[str, float]]]]

_MAX_AGE_S: Final = 2.0
_WAIT_S: Final = 0.1
# The engine reports that a single token, such as that of the warm-up, took no time.
_SPAN_MIN_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The last reading of a process."""

    pid: int | None  # None before there is a process
    tokens: float = 0  # tokens decoded since its start; grows when a request ends
    decoding_s: float = 0  # seconds that their decoding took, summed over sequences
    drafted_tokens: int = 0  # tokens drafted since its start
    accepted_tokens: int = 0  # drafted tokens that were accepted
    # Decoding speed of one sequence since the previous reading, or None.
    tokens_per_second: float | None = None
    memory_bytes: int | None = None  # resident memory, or None

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted, 0 to 1; None before any was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None


class StatsReader:
    """Reads instances; `read` waits a number of seconds for metrics, by instance."""

    def __init__(self, read: ReadEngines) -> None:
        self._read_engines = read
        self._by_name: dict[str, EngineStats] = {}
        self._read_at_s = float("-inf")

    def stats_of(self, facts: InstanceSnapshot) -> EngineStats:
        """Return the last reading of an instance's present process."""
        found = self._by_name.get(facts.name)
        return found if found and found.pid == facts.pid else EngineStats(facts.pid)

    async def refresh(self, instances: Iterable[Instance]) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._read_at_s < _MAX_AGE_S:
            return
        self._read_at_s = now_s
        snapshots = [instance.snapshot() for instance in instances]
        self._by_name = {facts.name: self.stats_of(facts) for facts in snapshots}
        metrics = await self._read_engines(_WAIT_S)
        for facts in snapshots:
            memory = memory_bytes(facts.pid) if facts.pid else None
            found = metrics.get(facts.name, {}) if facts.state is State.READY else {}
            self._by_name[facts.name] = combine(self.stats_of(facts), found, memory)


def combine(before: EngineStats, metrics: Mapping[str, float], memory: int | None) -> EngineStats:
    """Combine metrics with the previous reading; the speed stays until tokens are decoded."""
    tokens = metrics.get("tokens_predicted_total", before.tokens)
    decoding_s = metrics.get("tokens_predicted_seconds_total", before.decoding_s)
    speed = before.tokens_per_second
    if decoding_s - before.decoding_s >= _SPAN_MIN_S:
        speed = (tokens - before.tokens) / (decoding_s - before.decoding_s)
    drafted = metrics.get("spec_decode_num_draft_tokens_total", before.drafted_tokens)
    accepted = metrics.get("spec_decode_num_accepted_tokens_total", before.accepted_tokens)
    return EngineStats(before.pid, tokens, decoding_s, int(drafted), int(accepted), speed, memory)


_RECENT_MAX: Final = 32
_INSTANCES_MAX: Final = 256


class OtherRequests:
    """Counts the other requests of an instance during each; `in_flight` counts those that run."""

    def __init__(self, in_flight: Callable[[str], int], clock: Callable[[], float]) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._ends_at_s: dict[str, deque[float]] = {}  # of the latest requests, by instance

    def count(self, instance: str, fields: Mapping[str, Any]) -> int:
        """Return how many others there were during the request that ends now."""
        now_s = self._clock()
        held_s: float = (fields["duration_ms"] - waited_ms(fields)) / 1000
        recent = self._ends_at_s.setdefault(instance, deque(maxlen=_RECENT_MAX))
        if len(self._ends_at_s) > _INSTANCES_MAX:
            del self._ends_at_s[next(iter(self._ends_at_s))]
        ended: int = sum(end_at_s > now_s - held_s for end_at_s in recent)
        recent.append(now_s)
        return ended + max(0, self._in_flight(instance))
