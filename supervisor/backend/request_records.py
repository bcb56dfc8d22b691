"""Connects the proxy with records: usage and its metrics, past requests, the router's events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.endpoints.usage import UsageQuestion
from proxy.errors import BadRequest, StorageFailed, Unavailable, quote
from proxy.observe.metrics import BY_INSTANCE
from proxy.observe.past import HistoryQuery, StoredRequest
from proxy.router.reports import Tokens
from supervisor.backend.models import without_directories
from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.errors import HistoryUnavailable
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.records.history import History
from supervisor.records.usage import By, Query, Totals, Usage, first_day, groups, members
from supervisor.records.usage_files import read_all
from supervisor.rpc.relay import ShardRun
from supervisor.system.processor_load import process_s

_TIMEOUT_S = 1.0


class UsageEngines:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def ready(self) -> Iterator[tuple[str, str, int]]:
        for replica in self._fleet.all_replicas():
            facts = replica.instance.snapshot()
            if facts.state is State.READY and facts.pid:
                yield facts.name, facts.model, facts.pid

    def pid(self, instance: str, /) -> int | None:
        facts = self._facts(instance)
        return facts.pid if facts else None

    def cpu_s(self, pid: int, /) -> float | None:
        return process_s(pid)

    async def count_tokens(self, instance: str, /) -> Tokens | None:
        if (facts := self._facts(instance)) is None:
            return None
        try:
            async with (
                EngineClient(facts.endpoint, facts.api_key) as client,
                asyncio.timeout(_TIMEOUT_S),
            ):
                found = await client.read_metrics()
        except (TimeoutError, EngineUnreachable):
            return None
        if isinstance(found, ErrorResponse):
            return None
        names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
        return Tokens(*(int(found.get(name, 0)) for name in names))

    def _facts(self, instance: str) -> InstanceSnapshot | None:
        found = (replica for replica in self._fleet.all_replicas() if replica.name == instance)
        return next((replica.instance.snapshot() for replica in found), None)


_USAGE_LABELS: Final = ("client", "model")
_AGE_MAX_S: Final = 1.0


class UsageReaderAdapter:
    """Reads the files in a thread, at most once a second."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._turn = asyncio.Lock()
        self._totals: Totals = {}
        self._read_at_s = float("-inf")

    async def usage(self, question: UsageQuestion, /) -> Sequence[Mapping[str, Any]]:
        query = _query(question)
        try:
            async with self._turn:
                now_s = asyncio.get_running_loop().time()
                if now_s - self._read_at_s > _AGE_MAX_S:
                    self._totals = await asyncio.to_thread(read_all, self._root)
                    self._read_at_s = asyncio.get_running_loop().time()
                found = self._totals
        except OSError as error:
            raise Unavailable(f"usage cannot be read: {error.strerror}") from error
        return [members(query.names, group) for group in groups(found, query)]


def _query(question: UsageQuestion) -> Query:
    if question.by not in {None, *get_args(By)}:
        choices = ", ".join(get_args(By))
        raise BadRequest(f"by={quote(question.by or '')} is unknown; expected {choices}")
    today = datetime.now().astimezone().date()
    try:
        since = first_day(question.since, today)
    except ValueError as error:
        raise BadRequest(f"since: {error}; write 2026-11-22, 2026-11 or 7d") from error
    by: Any = question.by
    return Query(by, since, question.key, question.model)


def usage_metrics(since_start: Mapping[tuple[str, str], Usage]) -> Iterator[Metric]:
    """Yield counters since the daemon's start, by key and model."""
    requests = _family("requests", "Requests that an instance got, by API key.")
    tokens = _family("tokens", "Tokens by API key: prompt, cached or generated.", "kind")
    slot_s = _family("slot_seconds", "How long requests of an API key held slots.")
    cpu_s = _family("cpu_seconds", "Processor time of engines by API key.")
    for labels, usage in sorted(since_start.items()):
        requests.add_metric(labels, usage.requests)
        slot_s.add_metric(labels, usage.slot_s)
        cpu_s.add_metric(labels, usage.cpu_s)
        tokens.add_metric((*labels, "prompt"), usage.prompt_tokens)
        tokens.add_metric((*labels, "cached"), usage.cached_tokens)
        tokens.add_metric((*labels, "generated"), usage.generated_tokens)
    yield from (requests, tokens, slot_s, cpu_s)


def _family(name: str, text: str, *more: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"corral_client_{name}", text, labels=(*_USAGE_LABELS, *more))


class RequestHistoryAdapter:
    def __init__(self, history: History) -> None:
        self._history = history

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Implements `RequestHistory.requests`; empty while the history is off."""
        if not self._history.is_on:
            return ()
        try:
            return await self._history.requests(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error


_SHARD_LABELS: Final = (*BY_INSTANCE, "worker")
_US_PER_S: Final = 1_000_000
_TIMES: Final = (
    ("min_latency_us", "min", "Time of the shortest of these passes."),
    ("max_latency_us", "max", "Time of the longest of these passes."),
    ("last_latency_us", "last", "Time of the latest of these passes."),
)


def shard_metrics(runs: Iterable[tuple[Replica, ShardRun]]) -> Iterator[Metric]:
    """Yield the measurements of workers since each instance started."""
    forwards = CounterMetricFamily(
        "corral_shard_forwards", "Passes through the layers of a worker.", labels=_SHARD_LABELS
    )
    seconds = CounterMetricFamily(
        "corral_shard_compute_seconds", "Time that these passes took.", labels=_SHARD_LABELS
    )
    times = {
        field: GaugeMetricFamily(f"corral_shard_compute_{word}_seconds", text, labels=_SHARD_LABELS)
        for field, word, text in _TIMES
    }
    layers = GaugeMetricFamily("corral_shard_layers", "Layers of a worker.", labels=_SHARD_LABELS)
    for replica, run in runs:
        for name, found in run.balancer.metrics.items():
            labels = (replica.place.model, replica.name, name)
            forwards.add_metric(labels, found.total_forwards)
            seconds.add_metric(labels, found.total_latency_us / _US_PER_S)
            layers.add_metric(labels, found.layer_count)
            if found.total_forwards:
                for field, family in times.items():
                    family.add_metric(labels, getattr(found, field) / _US_PER_S)
    yield from (forwards, seconds, *times.values(), layers)
