"""What the batches of one model were. Names of `BatchQueueStats` are those of realizar 0.8.5."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.batch.former import Formed


@dataclass(frozen=True, slots=True)
class BatchQueueStats:
    """Since the start.

    Attributes:
        total_queued: Requests that joined.
        total_batches: Batches that began.
        total_single: Requests that began singly.
        avg_batch_size: Requests of a batch, on average.
        avg_wait_ms: How long a request waited until it was its turn, on average.
    """

    total_queued: int = 0
    total_batches: int = 0
    total_single: int = 0
    avg_batch_size: float = 0.0
    avg_wait_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """The sums behind `BatchQueueStats`; `waiting` is how many wait now."""

    waiting: int = 0
    queued: int = 0
    batches: int = 0
    batched: int = 0
    single: int = 0
    begun: int = 0
    waited_ms: float = 0.0

    def joined(self, count: int) -> Counts:
        return replace(self, waiting=self.waiting + count, queued=self.queued + count)

    def formed(self, formed: Formed) -> Counts:
        if not formed.is_batch:
            return replace(self, single=self.single + formed.size)
        return replace(self, batches=self.batches + 1, batched=self.batched + formed.size)

    def begins(self, waited_ms: float) -> Counts:
        return replace(self, begun=self.begun + 1, waited_ms=self.waited_ms + waited_ms)

    def left(self) -> Counts:
        return replace(self, waiting=self.waiting - 1)

    def stats(self) -> BatchQueueStats:
        return BatchQueueStats(
            total_queued=self.queued,
            total_batches=self.batches,
            total_single=self.single,
            avg_batch_size=round(self.batched / self.batches, 3) if self.batches else 0.0,
            avg_wait_ms=round(self.waited_ms / self.begun, 3) if self.begun else 0.0,
        )


_COUNTERS: Final[Mapping[str, tuple[str, Callable[[BatchQueueStats], float]]]] = {
    "corral_batch_requests_queued": ("Batch requests that joined.", lambda one: one.total_queued),
    "corral_batches_formed": ("Batches that began.", lambda one: one.total_batches),
    "corral_batch_requests_single": (
        "Batch requests that began singly.",
        lambda one: one.total_single,
    ),
}
_GAUGES: Final[Mapping[str, tuple[str, Callable[[BatchQueueStats], float]]]] = {
    "corral_batch_size_mean": ("Requests of a batch, on average.", lambda one: one.avg_batch_size),
    "corral_batch_wait_mean_seconds": (
        "Wait of a batch request until its turn, on average.",
        lambda one: one.avg_wait_ms / 1000,
    ),
}


def metrics_of(stats: Mapping[str, BatchQueueStats]) -> Iterator[Metric]:
    """Yield the figures of all models for Prometheus."""
    for family_of, figures in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, (text, value) in figures.items():
            family = family_of(name, text, labels=("model",))
            for model, one in stats.items():
                family.add_metric((model,), value(one))
            yield family
