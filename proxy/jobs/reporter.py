"""What jobs report: events, and the figures of `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from proxy.access_log import Emit
from proxy.jobs.records import ACTIVE, ENDED, Batch, Outcome, Status

_PREFIX: Final = "corral_"


class JobReporter:
    """Emits events, and counts since the start."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._lines: Counter[Outcome] = Counter({"completed": 0, "failed": 0, "expired": 0})
        self._ended: Counter[Status] = Counter(dict.fromkeys(ENDED, 0))
        self._active: dict[str, Status] = {}
        self._is_paused = False
        self._waits: dict[str, str] = {}

    def changed(self, batch: Batch) -> None:
        """Note the status of a batch."""
        if batch.is_active:
            self._active[batch.id] = batch.status
            return
        self._active.pop(batch.id, None)
        self._waits.pop(batch.id, None)
        self._ended[batch.status] += 1
        self._emit(
            "batch.ended",
            batch=batch.id,
            status=batch.status,
            total=batch.total,
            completed=batch.completed,
            failed=batch.failed,
        )

    def stored(self, batch: Batch, outcomes: Sequence[Outcome]) -> None:
        self._lines.update(outcomes)
        self._waits.pop(batch.id, None)

    def waits(self, batch: Batch, reason: str) -> None:
        """A line of a batch cannot be computed now."""
        self._waits[batch.id] = reason

    def wait_reason(self, batch: Batch) -> str | None:
        """Why a batch makes no progress, unless it does."""
        return self._waits.get(batch.id)

    def paused(self, reason: str | None) -> None:
        """The database cannot be written, for a reason, or can be again."""
        self._is_paused = reason is not None
        if reason is None:
            self._emit("batches.resumed")
        else:
            self._emit("batches.paused", reason=reason)

    def collect(self) -> Iterator[Metric]:
        statuses = Counter(self._active.values())
        text = "Batches that have not ended, by status."
        gauge = GaugeMetricFamily(_PREFIX + "batches", text, labels=("status",))
        for status in ACTIVE:
            gauge.add_metric((status,), statuses[status])
        yield gauge
        text = "Batches that have ended, by status."
        ended = CounterMetricFamily(_PREFIX + "batches_ended", text, labels=("status",))
        for status, count in self._ended.items():
            ended.add_metric((status,), count)
        yield ended
        text = "Lines of batches with a result, by outcome."
        lines = CounterMetricFamily(_PREFIX + "batch_lines", text, labels=("outcome",))
        for outcome, count in self._lines.items():
            lines.add_metric((outcome,), count)
        yield lines
        text = "Whether batches are paused because their database cannot be written."
        yield GaugeMetricFamily(_PREFIX + "batches_paused", text, value=float(self._is_paused))
