"""The queue in which batch requests gather until their batch begins.

The engine batches all requests that run at once. So a batch here only decides when its requests
begin: together, so that their prompts share the engine's passes. Too few requests for a batch begin
singly, without waiting for each other. State changes only in methods without `await`. The names of
`BatchQueueStats` are those of realizar 0.8.5.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

from prometheus_client import Metric

from proxy.errors import QueueFull
from proxy.observe.metrics import counter, gauge
from proxy.settings import BatchConfig


def form(config: BatchConfig, waiting: int, waited_ms: float) -> tuple[int, bool] | float:
    """Decide whether gathering requests begin now.

    Args:
        waiting: The number of gathering requests, at least 1.
        waited_ms: How long the oldest of them has waited.

    Returns:
        How many of the oldest begin now, and whether as a batch or singly, because they are too
        few; otherwise the milliseconds to wait for more.
    """
    if not config.should_process(waiting) and waited_ms < config.window_ms:
        return config.window_ms - waited_ms
    size = min(waiting, config.max_batch)
    return size, config.meets_minimum(size)


@dataclass(frozen=True, slots=True)
class BatchQueueStats:
    """Statistics of one model since the start."""

    total_queued: int = 0  # Requests that joined.
    total_batches: int = 0  # Batches that began.
    total_single: int = 0  # Requests that began singly.
    avg_batch_size: float = 0.0  # Average number of requests in a batch.
    avg_wait_ms: float = 0.0  # Average wait of a request until its turn.


_COUNTERS: Final = {
    "batch_requests_queued": "total_queued",
    "batches_formed": "total_batches",
    "batch_requests_single": "total_single",
}


def metrics_of(stats: Mapping[str, BatchQueueStats]) -> Iterator[Metric]:
    by_model = {(model,): its for model, its in stats.items()}
    for name, figure in _COUNTERS.items():
        yield counter(name, {key: getattr(its, figure) for key, its in by_model.items()})
    yield gauge("batch_size_mean", {key: its.avg_batch_size for key, its in by_model.items()})
    waits_s = {key: its.avg_wait_ms / 1000 for key, its in by_model.items()}
    yield gauge("batch_wait_mean_seconds", waits_s)


_RETRY_MAX_S: Final = 120


class Turn:
    def __init__(self, client: str, joined_at_s: float) -> None:
        self.client = client
        self.joined_at_s = joined_at_s
        self.formed = asyncio.Event()  # Set when the request may begin.
        # The requests of its batch, itself included; None if it begins singly. Valid once `formed`
        # is set.
        self.batch_size: int | None = None
        self.has_begun = False


class BatchQueue:
    """The batch requests of all models; requests of one model gather together.

    The limit of the queue's size holds for each client.
    """

    def __init__(self, config: BatchConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._models: dict[str, _ModelBatches] = {}

    async def gather(self, model: str, client: str) -> None:
        """Wait until a request's batch is formed.

        Raises QueueFull: too many requests of the client wait already.
        """
        with self.join(model, client, 1) as (turn,):
            await turn.formed.wait()
            self.begin(model, turn)

    @contextmanager
    def join(self, model: str, client: str, count: int) -> Iterator[Sequence[Turn]]:
        """Join with `count` requests; those that have not begun leave at the end of the block.

        Raises QueueFull: too many requests of the client wait already.
        """
        batches = self._batches(model)
        turns = batches.join(client, count)
        try:
            yield turns
        finally:
            batches.leave(turns)

    def begin(self, model: str, turn: Turn) -> None:
        self._batches(model).begin(turn)

    def stats(self) -> Mapping[str, BatchQueueStats]:
        return {model: queue.stats() for model, queue in self._models.items()}

    def waiting(self) -> Mapping[str, int]:
        return {model: queue.waiting for model, queue in self._models.items()}

    def _batches(self, model: str) -> _ModelBatches:
        return self._models.setdefault(model, _ModelBatches(self.config, self._clock))


class _ModelBatches:
    """The batch requests of one model; `waiting` is their number now."""

    def __init__(self, config: BatchConfig, clock: Callable[[], float]) -> None:
        self.waiting = 0
        self._queued = 0
        self._batches = 0
        self._batched = 0
        self._single = 0
        self._begun = 0
        self._waited_ms = 0.0
        self._config = config
        self._clock = clock
        self._gathering: dict[Turn, None] = {}  # the oldest first
        self._waiting: Counter[str] = Counter()  # by client
        self._window: asyncio.TimerHandle | None = None

    def stats(self) -> BatchQueueStats:
        return BatchQueueStats(
            total_queued=self._queued,
            total_batches=self._batches,
            total_single=self._single,
            avg_batch_size=round(self._batched / self._batches, 3) if self._batches else 0.0,
            avg_wait_ms=round(self._waited_ms / self._begun, 3) if self._begun else 0.0,
        )

    def join(self, client: str, count: int) -> Sequence[Turn]:
        waiting = self._waiting.get(client, 0)
        if waiting + count > self._config.queue_size:
            raise QueueFull(
                f"{waiting} batch requests of this client wait already, and "
                f"{self._config.queue_size} may (queue_size under [proxy.batch]); retry later",
                min(max(1, math.ceil(self.stats().avg_wait_ms / 1000)), _RETRY_MAX_S),
            )
        turns = [Turn(client, self._clock()) for _ in range(count)]
        self._waiting[client] += count
        self.waiting += count
        self._queued += count
        self._gathering.update(dict.fromkeys(turns))
        self._form()
        return turns

    def begin(self, turn: Turn) -> None:
        turn.has_begun = True
        self._end_wait(turn)
        self._begun += 1
        self._waited_ms += (self._clock() - turn.joined_at_s) * 1000

    def leave(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            self._gathering.pop(turn, None)
            if not turn.has_begun:
                self._end_wait(turn)
        self._form()

    def _end_wait(self, turn: Turn) -> None:
        self.waiting -= 1
        self._waiting[turn.client] -= 1
        if not self._waiting[turn.client]:
            del self._waiting[turn.client]

    def _form(self) -> None:
        if self._window:
            self._window.cancel()
            self._window = None
        while oldest := next(iter(self._gathering), None):
            waited_ms = (self._clock() - oldest.joined_at_s) * 1000
            formed = form(self._config, len(self._gathering), waited_ms)
            if not isinstance(formed, tuple):
                loop = asyncio.get_running_loop()
                self._window = loop.call_later(formed / 1000, self._form)
                return
            size, is_batch = formed
            if is_batch:
                self._batches += 1
                self._batched += size
            else:
                self._single += size
            for turn in tuple(islice(self._gathering, size)):
                del self._gathering[turn]
                turn.batch_size = size if is_batch else None
                turn.formed.set()
