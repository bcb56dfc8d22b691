"""Batch requests that gather or wait for their turn: how many, and when they begin.

State changes only in methods without `await`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

from proxy.batch.former import Formed, Gathering, form
from proxy.batch.stats import BatchQueueStats, Counts
from proxy.batch_config import BatchConfig
from proxy.errors import QueueFull
from proxy.request import ProxyRequest

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
        return {model: one.counts.stats() for model, one in self._models.items()}

    def waiting(self) -> Mapping[str, int]:
        """How many requests wait, by model."""
        return {model: one.counts.waiting for model, one in self._models.items()}

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
