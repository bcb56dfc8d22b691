"""The daemon's records: in the journal at once, in the database in batches, by a thread.

A process that is killed loses only the requests in flight. The files are not synced: a crash of the
machine may lose the last seconds. Questions are answered when the journal is in the database.

The journal is a file beside the database, with rows that are not in it yet. They are written at
once, as a line of JSON, and outlive a `kill -9` of the process. Every few seconds, one transaction
adds the journal to the database and notes its name; then it is deleted, while the next one is
written. A process that is killed in between finds the note, and adds no row twice. A line begins
with the end of the line before and closes with its bracket, so a line that was cut off is no JSON,
and is dropped.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import Lock
from typing import Any, Final, TypeVar

import orjson
from attrs import define, field

from proxy.common.background_tasks import worker_threads
from proxy.observe.past import HistoryQuery, RatesQuery, StoredRequest
from supervisor.errors import HistoryUnavailable
from supervisor.events import Emit, Event, Part
from supervisor.records import older, requests, usage
from supervisor.records.older import RUN_BITS
from supervisor.records.requests import FINISHED, REJECTED, Row
from supervisor.records.store import ACCOUNTS_MAX, RecordsFailedError, RecordStore
from supervisor.records.usage import Account, Query, Usage

_FULL_BYTES: Final = 256 * 1024  # of some five hundred requests
# While the database cannot be written; further rows wait in memory.
_STOP_BYTES: Final = 32 * 1024**2


class Journal:
    """Writes rows at once; up to `held_max` that the disk does not take wait in memory.

    The rows of one call are one line. A row begins with the name of its table.

    Attributes:
        size_bytes: Of the present file.
        tables: Those of the rows that were written or held; the user clears them.
        dropped: How many rows were dropped: the oldest that were held.
    """

    def __init__(self, held_max: int) -> None:
        self.size_bytes = 0
        self.tables: set[str] = set()
        self.dropped = 0
        self._held_max = held_max
        self._lock = Lock()  # the event loop writes, and a thread goes on to the next file
        self._file: int | None = None
        self._rows: deque[Row] = deque()
        self._usage: dict[Account, Usage] = {}

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def write(self, *rows: Row) -> None:
        with self._lock:
            self._write(rows)

    def begin(self, file: int) -> None:
        """Continue in an empty file."""
        with self._lock:
            self.close()
            self._file, self.size_bytes = file, 0

    def write_held(self) -> bool:
        """Write the waiting rows; return whether none waits any more."""
        with self._lock:
            rows, self._rows = self._rows, deque()
            rows.extend(("usage", *account, *used) for account, used in self._usage.items())
            self._usage = {}
            for row in rows:
                self._write((row,))
            return not (self._rows or self._usage)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, rows: Sequence[Row]) -> None:
        is_written = self._append(rows)
        for row in rows:
            self.tables.add(str(row[0]))
            if not is_written:
                self._hold(row)

    def _append(self, rows: Sequence[Row]) -> bool:
        if self._file is None or self.size_bytes > _STOP_BYTES:
            return False
        try:
            line = b"\n" + orjson.dumps(rows)
        except TypeError:  # a client's lone surrogate, or a number beyond 64 bits
            return True
        try:
            written = os.write(self._file, line)
        except OSError:
            return False
        self.size_bytes += written
        return written == len(line)

    def _hold(self, row: Row) -> None:
        if found := older.usage_row(row[1:]) if row[0] == "usage" else None:
            usage.hold(self._usage, *found, ACCOUNTS_MAX)
            return
        self._rows.append(row)
        if len(self._rows) > self._held_max:
            self._rows.popleft()
            self.dropped += 1


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


@define(eq=False, slots=False)
class Records(Part):
    """The records of one daemon.

    Args:
        store: The database; used in a separate thread.
        emit: Reports failures.
        history_limits: Returns the bytes and days of the history, or None while it is off.
        is_recorded: Whether the sizes of a model's requests are recorded.
        retry_s: Pause after a failed write.
        held_max: How many rows may wait in memory for the disk; above it, the oldest are dropped.
    """

    task = "records"

    _store: RecordStore
    _emit: Emit
    _history_limits: Callable[[], tuple[int, float] | None]
    _is_recorded: Callable[[str], bool]
    _retry_s: float = 3.0
    _held_max: int = 16_384
    _arrived: asyncio.Event = field(factory=asyncio.Event, init=False)
    _is_full: asyncio.Event = field(factory=asyncio.Event, init=False)
    _reported_dropped: int = field(default=0, init=False)
    _warned: set[str] = field(factory=set, init=False)
    _batches: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._run = secrets.randbits(RUN_BITS)
        self._thread = worker_threads(1, "records")
        self._journal = Journal(self._held_max)

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

    async def rates(self, query: RatesQuery) -> Mapping[str, Sequence[float | None]]:
        """Return the rates of intervals; raises HistoryUnavailable."""
        found: Mapping[str, Sequence[float | None]] = await self.answer("rates", query)
        return found

    async def cache_rates(self, query: RatesQuery) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Return tokens by tier, for each model and interval; raises HistoryUnavailable."""
        found: Mapping[str, Mapping[str, Sequence[float]]] = await self.answer("cache_rates", query)
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
        if self._journal.size_bytes >= _FULL_BYTES:
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
        """Warn of the first failure in a row for each kind of record; then, of the lost rows."""
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
        """Go on with an empty journal, and add the old one; raises RecordsFailedError."""
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
