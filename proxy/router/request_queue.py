"""The requests that wait for one model, and how many may."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.request import Priority
from proxy.router.fair_queue import FairQueue
from proxy.router.queued_request import QueuedRequest
from proxy.settings import ProxySettings


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Numbers of requests; `expected_wait_s` is that of one that joins now."""

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class RequestQueue(FairQueue[QueuedRequest]):
    def __init__(self, model: str, settings: ProxySettings) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def is_full(self, priority: Priority) -> bool:
        """Return whether too many wait; batch requests fill no queue of interactive ones."""
        limits = self.settings
        most = limits.queue_max if priority == "interactive" else limits.batch.config.queue_size
        return self.waiting(priority) > most

    def stats(self, now_s: float, expected_wait_s: float) -> QueueStats:
        return QueueStats(
            self.waiting("interactive"),
            self.waiting("batch"),
            self.oldest_wait_s(now_s),
            expected_wait_s,
        )
