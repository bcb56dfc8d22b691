"""The daemon's records: in the journal at once, in the database in batches, by a thread.

A process that is killed loses only the requests in flight. The files are not synced: a crash of the
machine may lose the last seconds. Questions are answered when the journal is in the database.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from proxy.common.background_tasks import worker_threads
from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import Emit, Event, Part
from supervisor.records import requests, usage
from supervisor.records.journal import FULL_BYTES, Journal
from supervisor.records.older import RUN_BITS
from supervisor.records.requests import FINISHED, REJECTED, Row
from supervisor.records.store import RecordsFailedError, RecordStore
from supervisor.records.usage import Query, Usage

# Between two batches, so that many requests share one; a full journal waits for none.
_PAUSE_S: Final = 2.0
_DAY_S: Final = 86_400
# Sizes and usage are pruned with the first batch, and then with each of so many.
_PRUNE_BATCHES: Final = 256
_WARNINGS: Final = {
    "requests": "history.write_failed",
    "sizes": "requests.record_failed",
    "usage": "usage.record_failed",
}

Result = TypeVar("Result")


class Records(Part):
    """The records of one daemon.

    Args:
        store: Where they are kept; used in a thread of its own.
        emit: Reports failures.
        history_limits: Returns the bytes and days of the history, or None while it is off.
        is_recorded: Whether the sizes of a model's requests are recorded.
        retry_s: Pause after a failed write.
        held_max: How many rows may wait in memory for the disk; above it, the oldest are dropped.
    """

    task = "records"

    def __init__(
        self,
        store: RecordStore,
        emit: Emit,
        history_limits: Callable[[], tuple[int, float] | None],
        is_recorded: Callable[[str], bool],
        *,
        retry_s: float = 3.0,
        held_max: int = 16_384,
    ) -> None:
        self._store = store
        self._emit = emit
        self._history_limits = history_limits
        self._is_recorded = is_recorded
        self._retry_s = retry_s
        self._run = secrets.randbits(RUN_BITS)
        self._thread = worker_threads(1, "records")
        self._journal = Journal(held_max)
        self._arrived = asyncio.Event()
        self._is_full = asyncio.Event()
        self._reported_dropped = 0
        self._warned: set[str] = set()
        self._batches = 0

    def observe(self, event: Event) -> None:
        if event.name not in {FINISHED, REJECTED}:
            return
        rows = [requests.row_of(event, self._run)] if self.keeps_history else []
        if event.name == FINISHED and self._is_recorded(str(event.fields["model"])):
            rows += requests.sizes_rows_of(event, self._run)
        if rows:
            self._write(*rows)

    def add_usage(self, key: str, model: str, used: Usage) -> None:
        self._write(("usage", time.strftime("%Y-%m-%d"), key, model, *used))

    @property
    def keeps_history(self) -> bool:
        return self._history_limits() is not None

    async def serve(self) -> None:
        """Add to the database until cancelled, and then the rest."""
        try:
            while True:
                if not await self._flush():
                    await asyncio.sleep(self._retry_s)
                    continue
                await self._arrived.wait()
                self._arrived.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PAUSE_S):
                        await self._is_full.wait()
                self._is_full.clear()
        finally:
            self._thread.submit(self._close).result()

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Return stored requests, the latest first, even just ended; raises HistoryUnavailable."""
        found: Sequence[StoredRequest] = await self.answer("requests", query)
        return found

    async def usage(self, query: Query) -> list[dict[str, Any]]:
        """Return sums as JSON members; raises HistoryUnavailable."""
        found: list[dict[str, Any]] = await self.answer("usage", query)
        return found

    async def answer(self, question: str, asked: object) -> Any:
        """Answer one of `store.QUESTIONS`; raises HistoryUnavailable."""
        if question == "requests" and not self.keeps_history:
            raise HistoryUnavailable("no history is kept", hint="set enabled = true in [history]")
        await self._flush()
        try:
            return await self._in_thread(lambda: self._store.answer(question, asked))
        except RecordsFailedError as error:
            raise HistoryUnavailable(f"the records cannot be used: {error}") from error
        finally:
            self._report_problems()

    def _write(self, *rows: Row) -> None:
        self._journal.write(*rows)
        self._arrived.set()
        if self._journal.size_bytes >= FULL_BYTES:
            self._is_full.set()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _flush(self) -> bool:
        """Add the journal to the database; return whether that succeeded."""
        failure = None
        try:
            await self._in_thread(self._add)
        except RecordsFailedError as error:
            failure = str(error)
        self._report(failure)
        return failure is None

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row for each kind of record; then, of what it cost."""
        self._report_problems()
        if failure is not None:
            affected = {_WARNINGS[table] for table in tuple(self._journal.tables) or ("usage",)}
            for name in sorted(affected - self._warned):
                self._emit(name, reason=failure)
            self._warned |= affected
            return
        self._warned = set()
        dropped, self._reported_dropped = self._reported_dropped, self._journal.dropped
        if newly_dropped := self._reported_dropped - dropped:
            reason = f"{newly_dropped} records were dropped: too many waited"
            self._emit(_WARNINGS["requests"], reason=reason)

    def _report_problems(self) -> None:
        while self._store.problems:
            name, fields = self._store.problems.popleft()
            self._emit(name, **fields)

    # In the thread.

    def _add(self) -> None:
        """Go on with an empty journal, and add what was written; raises RecordsFailedError."""
        journal = self._journal
        if not journal.is_open:
            journal.begin(self._store.begin_journal())
        is_written = journal.write_held()
        if journal.size_bytes:
            journal.begin(self._store.begin_journal())
        self._store.take_over(self._prune)
        if not is_written:
            raise RecordsFailedError(f"{self._store.path.parent}: no space is left on the disk")
        journal.tables.clear()

    def _prune(self, connection: sqlite3.Connection) -> None:
        if limits := self._history_limits():
            oldest_at = datetime.now(UTC).timestamp() - limits[1] * _DAY_S
            requests.prune_requests(connection, limits[0], oldest_at)
        if self._batches % _PRUNE_BATCHES == 0:
            requests.prune_sizes(connection)
            usage.prune_usage(connection)
        self._batches += 1

    def _close(self) -> None:
        with suppress(RecordsFailedError):
            self._add()
        self._journal.close()
        self._store.end_journal()
        with suppress(RecordsFailedError):
            self._store.take_over(self._prune)
        self._store.close()
