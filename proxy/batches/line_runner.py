"""Computes a line until it has a result, and stores the result.

A line is sent again after an answer of 429 or 503: the daemon is busy, the model is loading,
stopped or failed. The line is not at fault, and waits as long as its batch may. If its API key has
reached a limit, all lines of its batch wait, but no lines of other keys. A line that failed in an
instance is tried a few times. An error that the client could fix is the line's result at once, and
so is a request that crashed engines twice (422).

`Tools` holds everything that the parts of this package share: models of the owner, events and
figures, database.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from prometheus_client import Metric

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.batches import lines as lines_module
from proxy.batches import records, rows
from proxy.batches.database import Database
from proxy.batches.lines import RequestLine
from proxy.batches.own_requests import OwnAnswer, OwnRequests
from proxy.observe.metrics import counter, gauge
from proxy.observe.record import Emit
from proxy.request.models import ModelLoader, ModelNames
from proxy.settings import JobSettings

_NOBODY = "jobs"  # the client of batches without a key, for fairness between clients


def owner_of(key: Key | None) -> str:
    return key.name if key else ""


class JobReporter:
    """Emits events about batches, and counts since the start."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._lines: Counter[records.Outcome] = Counter({"completed": 0, "failed": 0, "expired": 0})
        self._ended: Counter[records.Status] = Counter(dict.fromkeys(records.ENDED, 0))
        self._active: dict[str, records.Status] = {}
        self._is_paused = False
        self._waits: dict[str, str] = {}

    def note_status(self, batch: records.Batch) -> None:
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

    def note_storage(self, batch: records.Batch, outcomes: Sequence[records.Outcome]) -> None:
        self._lines.update(outcomes)
        self._waits.pop(batch.id, None)

    def note_wait(self, batch: records.Batch, reason: str) -> None:
        self._waits[batch.id] = reason

    def wait_reason(self, batch: records.Batch) -> str | None:
        """Return why a batch makes no progress, or None."""
        return self._waits.get(batch.id)

    def note_pause(self, reason: str | None) -> None:
        """Note why the database cannot be used; None if it can be again."""
        self._is_paused = reason is not None
        if reason is None:
            self._emit("batches.resumed")
        else:
            self._emit("batches.paused", reason=reason)

    def collect(self) -> Iterator[Metric]:
        active = Counter(self._active.values())
        yield gauge("batches", {(status,): active[status] for status in records.ACTIVE})
        yield counter("batches_ended", {(status,): n for status, n in self._ended.items()})
        yield counter("batch_lines", {(outcome,): n for outcome, n in self._lines.items()})
        yield gauge("batches_paused", {(): float(self._is_paused)})


_BUSY: Final = frozenset({429, 503})
_FAILED: Final = frozenset({500, 502, 504})
_FIRST_S: Final = 1.0
_MAX_S: Final = 60.0


# The seconds before a line is sent again, and whether that counts as one of a few attempts.
Retry = tuple[float, bool]


def retry_of(answer: OwnAnswer, failures: int, waits: int, max_attempts: int) -> Retry | None:
    """Return the retry that follows an answer, None if the answer is the result.

    `failures` and `waits` are the counted and uncounted attempts before this one.
    """
    if answer.is_limited:
        return min(answer.retry_after_s or _FIRST_S, _MAX_S), False
    if answer.status in _BUSY:
        return _pause_s(waits, answer.retry_after_s), False
    if answer.status in _FAILED and failures + 1 < max_attempts:
        return _pause_s(failures, answer.retry_after_s), True
    return None


def _pause_s(before: int, hint_s: int | None) -> float:
    doubled_s = _FIRST_S * 2.0 ** min(before, 10)
    return min(max(doubled_s, hint_s or 0.0), _MAX_S)


@dataclass(frozen=True, slots=True)
class Tools:
    """The surroundings of a job; `now` returns Unix time in whole seconds."""

    database: Database
    requests: OwnRequests
    keys: ApiKeys
    loader: ModelLoader
    settings: JobSettings
    reporter: JobReporter
    now: Callable[[], int] = lambda: int(datetime.now(tz=UTC).timestamp())
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep

    def names_of(self, owner: str) -> ModelNames | None:
        """Return the models that an owner may use; None if its required key is gone."""
        names = self.loader.names()
        if not self.keys.are_needed:
            return names
        key = self.keys.find_key(owner)
        return names.visible(key.models) if key else None


Pause = Callable[[float], Awaitable[object]]


class KeyGone(Exception):
    """The API key of a batch's owner is gone."""


async def run_line(
    batch: records.Batch, line: records.StoredLine, request: RequestLine, tools: Tools, pause: Pause
) -> None:
    """Compute a line and store its result, unless cancelled; raises KeyGone.

    `pause` waits a number of seconds while lines of other keys are computed.
    """
    request_id = records.new_id("req_")
    answer = await _final_answer(batch, request, request_id, tools, pause)
    result = lines_module.result_of(line.number, request.custom_id, answer, request_id)
    await store(batch, [result], tools)


async def store(batch: records.Batch, results: list[records.LineResult], tools: Tools) -> None:
    await tools.database.run_until_done(rows.store_result, batch.key, results)
    tools.reporter.note_storage(batch, [result.outcome for result in results])


async def _final_answer(
    batch: records.Batch, request: RequestLine, request_id: str, tools: Tools, pause: Pause
) -> OwnAnswer:
    failures = waits = 0
    while True:
        names = tools.names_of(batch.owner)
        if names is None:
            raise KeyGone
        answer = await tools.requests.answer(
            batch.endpoint,
            request.members,
            client=batch.owner or _NOBODY,
            names=names,
            request_id=request_id,
        )
        retry = retry_of(answer, failures, waits, tools.settings.max_attempts)
        if retry is None:
            return answer
        wait_s, is_counted = retry
        failures, waits = failures + is_counted, waits + (not is_counted)
        tools.reporter.note_wait(batch, lines_module.message_of(answer.body))
        # While its key is limited, other lines may be computed.
        await (pause if answer.is_limited else tools.sleep)(wait_s)
