"""Batch requests that gather or wait for their turn: how many, and when they begin.

The engine batches whatever runs at once, so what a batch decides is when its requests begin:
together, that their prompts share the engine's passes. Fewer than a batch run singly, without
waiting for each other. State changes only in methods without `await`. Names of `BatchQueueStats`
are those of realizar 0.8.5.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.errors import QueueFull
from proxy.request.request import ProxyRequest
from proxy.settings import BatchConfig


@dataclass(frozen=True, slots=True)
class Formed:
    """The requests that begin now, the oldest of those that gather.

    Attributes:
        is_batch: Together; otherwise they are too few for that.
    """

    size: int
    is_batch: bool


@dataclass(frozen=True, slots=True)
class Gathering:
    """They wait for more, so long unless more arrive."""

    wait_ms: float


def form(config: BatchConfig, waiting: int, waited_ms: float) -> Formed | Gathering | None:
    """Decide what requests that gather do now; None where there is none.

    Args:
        config: The limits.
        waiting: How many gather.
        waited_ms: How long the oldest has.
    """
    if not waiting:
        return None
    if not config.should_process(waiting) and waited_ms < config.window_ms:
        return Gathering(config.window_ms - waited_ms)
    size = min(waiting, config.max_batch)
    return Formed(size, config.meets_minimum(size))


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
    "corral_batch_requests_queued": (
        "Batch requests that joined.",
        lambda stats: stats.total_queued,
    ),
    "corral_batches_formed": ("Batches that began.", lambda stats: stats.total_batches),
    "corral_batch_requests_single": (
        "Batch requests that began singly.",
        lambda stats: stats.total_single,
    ),
}
_GAUGES: Final[Mapping[str, tuple[str, Callable[[BatchQueueStats], float]]]] = {
    "corral_batch_size_mean": (
        "Requests of a batch, on average.",
        lambda stats: stats.avg_batch_size,
    ),
    "corral_batch_wait_mean_seconds": (
        "Wait of a batch request until its turn, on average.",
        lambda stats: stats.avg_wait_ms / 1000,
    ),
}


def metrics_of(stats: Mapping[str, BatchQueueStats]) -> Iterator[Metric]:
    """Yield the figures of all models for Prometheus."""
    for family_of, figures in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for name, (text, value) in figures.items():
            family = family_of(name, text, labels=("model",))
            for model, model_stats in stats.items():
                family.add_metric((model,), value(model_stats))
            yield family


_RETRY_MAX_S: Final = 120


def gathers(request: ProxyRequest) -> bool:
    """Return whether a request gathers; one from another proxy has done so there."""
    return request.priority == "batch" and request.kind.takes_slot and not request.is_from_proxy


class Turn:
    """One request's turn.

    Attributes:
        formed: Set when the request may begin.
        batch: The requests that it begins with, itself included; known when `formed` is set.
    """

    def __init__(self, client: str, joined_at_s: float) -> None:
        self.client = client
        self.joined_at_s = joined_at_s
        self.formed = asyncio.Event()
        self.batch = Formed(1, is_batch=False)
        self.has_begun = False


class BatchQueue:
    """The batch requests of all models; those of one model gather together.

    Each client may have so many waiting as the queue has room for.
    """

    def __init__(self, config: BatchConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._models: dict[str, _ModelBatches] = {}

    async def gather(self, model: str, client: str) -> None:
        """Wait until a request's batch is formed.

        Raises:
            QueueFull: Too many of the client wait already.
        """
        with self.joined(model, client, 1) as (turn,):
            await turn.formed.wait()
            self.begin(model, turn)

    @contextmanager
    def joined(self, model: str, client: str, count: int) -> Iterator[Sequence[Turn]]:
        """Join with so many requests; those that have not begun leave at the end of the block.

        Raises:
            QueueFull: Too many of the client wait already.
        """
        batches = self._batches(model)
        turns = batches.join(client, count)
        try:
            yield turns
        finally:
            batches.leave(turns)

    def begin(self, model: str, turn: Turn) -> None:
        """Count a request that waits no more."""
        self._batches(model).begin(turn)

    def stats(self) -> Mapping[str, BatchQueueStats]:
        return {model: queue.counts.stats() for model, queue in self._models.items()}

    def waiting(self) -> Mapping[str, int]:
        """How many requests wait, by model."""
        return {model: queue.counts.waiting for model, queue in self._models.items()}

    def _batches(self, model: str) -> _ModelBatches:
        return self._models.setdefault(model, _ModelBatches(self.config, self._clock))


class _ModelBatches:
    """The batch requests of one model."""

    def __init__(self, config: BatchConfig, clock: Callable[[], float]) -> None:
        self.counts = Counts()
        self._config = config
        self._clock = clock
        self._gathering: dict[Turn, None] = {}  # the oldest first
        self._waiting: Counter[str] = Counter()  # by client
        self._window: asyncio.TimerHandle | None = None

    def join(self, client: str, count: int) -> Sequence[Turn]:
        waiting = self._waiting.get(client, 0)
        if waiting + count > self._config.queue_size:
            raise QueueFull(
                f"{waiting} batch requests of this client wait already, and "
                f"{self._config.queue_size} may (queue_size under [proxy.batch]); retry later",
                self._retry_after_s,
            )
        turns = [Turn(client, self._clock()) for _ in range(count)]
        self._waiting[client] += count
        self.counts = self.counts.joined(count)
        self._gathering.update(dict.fromkeys(turns))
        self._form()
        return turns

    def begin(self, turn: Turn) -> None:
        turn.has_begun = True
        self._end_wait(turn)
        self.counts = self.counts.left().begins((self._clock() - turn.joined_at_s) * 1000)

    def leave(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._gathering.pop(turn, None)
            if not turn.has_begun:
                self._end_wait(turn)
                self.counts = self.counts.left()
        self._form()

    def _end_wait(self, turn: Turn) -> None:
        self._waiting[turn.client] -= 1
        if not self._waiting[turn.client]:
            del self._waiting[turn.client]

    def _form(self) -> None:
        """Form batches of those that gather, as long as that is due."""
        if self._window:
            self._window.cancel()
            self._window = None
        while isinstance(decision := self._decide(), Formed):
            self.counts = self.counts.formed(decision)
            for turn in tuple(islice(self._gathering, decision.size)):
                del self._gathering[turn]
                turn.batch = decision
                turn.formed.set()
        if isinstance(decision, Gathering):
            loop = asyncio.get_running_loop()
            self._window = loop.call_later(decision.wait_ms / 1000, self._form)

    def _decide(self) -> Formed | Gathering | None:
        oldest = next(iter(self._gathering), None)
        waited_s = self._clock() - oldest.joined_at_s if oldest else 0.0
        return form(self._config, len(self._gathering), waited_s * 1000)

    @property
    def _retry_after_s(self) -> int:
        return min(max(1, math.ceil(self.counts.stats().avg_wait_ms / 1000)), _RETRY_MAX_S)
