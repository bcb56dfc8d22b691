"""The daemon's records: writes them in batches, in a thread, and answers questions about them.

What arrives is written at once, together with what arrived during the write before. So a process
that is killed loses the requests in flight and those of the last milliseconds. The file is not
synced: a crash of the machine may lose the last seconds.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, TypeVar

from proxy.common.background_tasks import worker_threads
from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import Emit, Event, Part
from supervisor.records import requests, usage
from supervisor.records.older import RUN_BITS
from supervisor.records.requests import FINISHED, REJECTED, Row
from supervisor.records.store import RecordsFailedError, RecordStore
from supervisor.records.usage import Account, Query, Usage

# Between two writes, so that many requests share one.
_PAUSE_S: Final = 0.01
# What the thread holds while it cannot write: further accounts are added to that of others.
_ACCOUNTS_MAX: Final = 4096
_DAY_S: Final = 86_400
# Sizes and usage are pruned at the first write, and then at each of so many.
_PRUNE_WRITES: Final = 256
_WARNINGS: Final = {"requests": "history.write_failed", "sizes": "requests.record_failed"}
_USAGE_WARNING: Final = "usage.record_failed"

Result = TypeVar("Result")


class Records(Part):
    """The records of one daemon.

    Args:
        store: Where they are kept; used in a thread of its own.
        emit: Reports failures.
        history_limits: Returns the bytes and days of the history, or None while it is off.
        is_recorded: Whether the sizes of a model's requests are recorded.
        retry_s: Pause after a failed write.
        queue_max: What may wait for the thread; what arrives above it is dropped. As many rows may
            wait in the thread for the disk; above it, the oldest are dropped.
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
        queue_max: int = 16_384,
    ) -> None:
        self._store = store
        self._emit = emit
        self._history_limits = history_limits
        self._is_recorded = is_recorded
        self._retry_s = retry_s
        self._queue_max = queue_max
        self._run = secrets.randbits(RUN_BITS)
        self._thread = worker_threads(1, "records")
        self._queue: deque[Callable[[], None]] = deque()  # each adds to `_rows` or `_usage`
        self._arrived = asyncio.Event()
        self._dropped = 0  # of the queue
        self._reported_dropped = 0
        self._warned: set[str] = set()
        # Only the thread uses these: what is not written yet, and how many rows it has dropped.
        self._rows: deque[tuple[str, Row]] = deque()
        self._rows_dropped = 0
        self._usage: dict[Account, Usage] = {}
        self._writes = 0

    def observe(self, event: Event) -> None:
        if event.name not in {FINISHED, REJECTED}:
            return
        if self.keeps_history:
            self._put(partial(self._hold, "requests", requests.row_of, event))
        if event.name == FINISHED and self._is_recorded(str(event.fields["model"])):
            self._put(partial(self._hold, "sizes", requests.sizes_row_of, event))

    def add_usage(self, key: str, model: str, used: Usage) -> None:
        account = (time.strftime("%Y-%m-%d"), key, model)
        self._put(lambda: usage.hold(self._usage, account, used, _ACCOUNTS_MAX))

    @property
    def keeps_history(self) -> bool:
        return self._history_limits() is not None

    async def serve(self) -> None:
        """Write until cancelled, and then the rest."""
        try:
            if self._store.has_older:
                await self._flush()
            while True:
                await self._arrived.wait()
                self._arrived.clear()
                if await self._flush():
                    await asyncio.sleep(_PAUSE_S)
                else:
                    self._arrived.set()
                    await asyncio.sleep(self._retry_s)
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

    def _put(self, hold: Callable[[], None]) -> None:
        if len(self._queue) >= self._queue_max:
            self._dropped += 1
        else:
            self._queue.append(hold)
        self._arrived.set()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _flush(self) -> bool:
        """Write what waits; return whether that succeeded."""
        failure, affected, rows_dropped = await self._in_thread(self._try_to_write)
        self._report(failure, affected, self._dropped + rows_dropped)
        return failure is None

    def _report(self, failure: str | None, affected: set[str], dropped: int) -> None:
        """Warn of the first failure in a row for each kind of record; then, of what it cost."""
        self._report_problems()
        if failure is not None:
            for name in sorted(affected - self._warned):
                self._emit(name, reason=failure)
            self._warned |= affected
            return
        self._warned = set()
        newly_dropped, self._reported_dropped = dropped - self._reported_dropped, dropped
        if newly_dropped > 0:
            reason = f"{newly_dropped} records were dropped: too many waited"
            self._emit(_WARNINGS["requests"], reason=reason)

    def _report_problems(self) -> None:
        while self._store.problems:
            name, fields = self._store.problems.popleft()
            self._emit(name, **fields)

    # In the thread.

    def _try_to_write(self) -> tuple[str | None, set[str], int]:
        """Write what waits; return why that failed, the warnings of what waits, and lost rows."""
        try:
            self._write()
        except RecordsFailedError as error:
            affected = {_WARNINGS[table] for table, _ in self._rows}
            if self._usage or not affected:
                affected.add(_USAGE_WARNING)
            return str(error), affected, self._rows_dropped
        return None, set(), self._rows_dropped

    def _write(self) -> None:
        """Write all that was queued or could not be written; raises RecordsFailedError."""
        while self._queue:
            self._queue.popleft()()
        while len(self._rows) > self._queue_max:
            self._rows.popleft()
            self._rows_dropped += 1
        if self._rows or self._usage or self._store.has_older:
            self._store.run(self._insert)
            self._rows.clear()
            self._usage.clear()

    def _hold(self, table: str, row_of: Callable[[Event, int], Row | None], event: Event) -> None:
        if row := row_of(event, self._run):
            self._rows.append((table, row))

    def _insert(self, connection: sqlite3.Connection) -> None:
        for table, row in self._rows:
            requests.insert(connection, table, row)
        usage.add_usage(connection, self._usage)
        if limits := self._history_limits():
            oldest_at = datetime.now(UTC).timestamp() - limits[1] * _DAY_S
            requests.prune_requests(connection, limits[0], oldest_at)
        if self._writes % _PRUNE_WRITES == 0:
            requests.prune_sizes(connection)
            usage.prune_usage(connection)
        self._writes += 1

    def _close(self) -> None:
        with suppress(RecordsFailedError):
            self._write()
        self._store.close()
