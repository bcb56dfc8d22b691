"""Connects the proxy with records: past requests, sums of usage; metrics of RPC workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.endpoints.usage import UsageQuestion
from proxy.errors import BadRequest, StorageFailed, Unavailable, quote
from proxy.observe.metrics import BY_INSTANCE
from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.backend.models import without_directories
from supervisor.errors import HistoryUnavailable
from supervisor.fleet.model import Replica
from supervisor.records.usage import By, Query, first_day
from supervisor.records.writer import Records
from supervisor.rpc.relay import ShardRun


class RecordsAdapter:
    def __init__(self, records: Records) -> None:
        self._records = records

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Implements `RequestHistory.requests`; empty while the history is off."""
        if not self._records.keeps_history:
            return ()
        try:
            return await self._records.requests(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error

    async def usage(self, question: UsageQuestion, /) -> Sequence[Mapping[str, Any]]:
        query = _query(question)
        try:
            return await self._records.usage(query)
        except HistoryUnavailable as error:
            raise Unavailable(without_directories(error.message)) from error


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
