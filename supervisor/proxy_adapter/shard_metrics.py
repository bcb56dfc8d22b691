"""Metrics of the workers of split models, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.metrics.counters import BY_INSTANCE
from supervisor.fleet.model import Replica
from supervisor.shards.run import ShardRun

_LABELS: Final = (*BY_INSTANCE, "worker")
_US_PER_S: Final = 1_000_000
_TIMES: Final = (
    ("min_latency_us", "min", "Time of the shortest of these passes."),
    ("max_latency_us", "max", "Time of the longest of these passes."),
    ("last_latency_us", "last", "Time of the latest of these passes."),
)


def shard_metrics(runs: Iterable[tuple[Replica, ShardRun]]) -> Iterator[Metric]:
    """Yield what was measured since each instance started."""
    forwards = CounterMetricFamily(
        "corral_shard_forwards", "Passes through the layers of a worker.", labels=_LABELS
    )
    seconds = CounterMetricFamily(
        "corral_shard_compute_seconds", "Time that these passes took.", labels=_LABELS
    )
    times = {
        field: GaugeMetricFamily(f"corral_shard_compute_{word}_seconds", text, labels=_LABELS)
        for field, word, text in _TIMES
    }
    layers = GaugeMetricFamily("corral_shard_layers", "Layers of a worker.", labels=_LABELS)
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
