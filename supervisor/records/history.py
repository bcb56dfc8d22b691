"""Requests that have ended, in an SQLite database: figures only, never their texts.

Each field of a request's event has a column. To add a figure, add a field to `request.finished`
(`supervisor.events`) and a line here; an older database gets the column when it is opened.

The file has mode 0600, is written in batches, and is bounded by size and age. Its lock is
exclusive, so no shared memory file is mapped, whose growth on a full disk would end the process
with SIGBUS; while a daemon runs, commands read through it. A file that cannot be read is renamed
and replaced.

Source: sqlite.org/wal.html, section 8 on WAL without shared memory; sqlite.org/pragma.html.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from proxy.batches.database import run_in_transaction
from proxy.observe.past import HistoryQuery, StoredRequest
from supervisor.errors import AccessDenied, HistoryUnavailable
from supervisor.events import Emit, Event
from supervisor.system.paths import make_private

FINISHED: Final = "request.finished"
REJECTED: Final = "request.rejected"

# `run` distinguishes the conversation numbers of different daemons.
_OWN: Final = {"id": "TEXT NOT NULL", "ended_at": "REAL NOT NULL", "run": "INTEGER NOT NULL"}
# Stored fields of the events, with their SQLite types.
FIGURES: Final[Mapping[str, str]] = {
    "client": "TEXT",
    "path": "TEXT",
    "model": "TEXT",
    "fallback_for": "TEXT",
    "instance": "TEXT",
    "slot": "INTEGER",
    "kind": "TEXT",
    "streamed": "INTEGER",
    "priority": "TEXT",
    "conversation": "INTEGER",
    "diverted": "INTEGER",
    "status": "INTEGER",
    "code": "TEXT",
    "cancelled": "TEXT",
    "attempts": "INTEGER",
    "continued": "INTEGER",
    "duration_ms": "REAL",
    "queued_ms": "REAL",
    "evict_ms": "REAL",
    "load_ms": "REAL",
    "prefill_ms": "REAL",
    "decode_ms": "REAL",
    "stalled_ms": "REAL",
    "other_ms": "REAL",
    "first_byte_ms": "REAL",
    "first_token_ms": "REAL",
    "bytes_out": "INTEGER",
    "expected_cached_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "prompt_tokens": "INTEGER",
    "decoded_tokens": "INTEGER",
    "engine_prefill_ms": "REAL",
    "engine_decode_ms": "REAL",
    "drafted_tokens": "INTEGER",
    "accepted_tokens": "INTEGER",
    "cache_cause": "TEXT",
    "cache_tier": "TEXT",
    "cache": "TEXT",
}
COLUMNS: Final[Mapping[str, str]] = {**_OWN, **FIGURES}
_TRUTHS: Final = frozenset({"streamed", "diverted"})
_OBJECTS: Final = frozenset({"cache"})  # as JSON

Row = tuple[object, ...]


def row_of(event: Event, run: int) -> Row:
    """Return the row of an ended request, in the order of COLUMNS."""
    figures = (_encode_value(name, event.fields.get(name)) for name in FIGURES)
    return (event.fields["request"], event.at.timestamp(), run, *figures)


def request_of(row: Mapping[str, Any]) -> StoredRequest:
    """Return a stored request for clients; `ended_at` is ISO 8601 in UTC."""
    found = {name: row[name] for name in COLUMNS if name != "run"}
    found["ended_at"] = datetime.fromtimestamp(row["ended_at"], UTC).isoformat("T", "milliseconds")
    for name in _TRUTHS:
        found[name] = None if row[name] is None else bool(row[name])
    for name in _OBJECTS:
        found[name] = None if row[name] is None else json.loads(row[name])
    return found


def _encode_value(name: str, value: object) -> object:
    return json.dumps(value) if name in _OBJECTS and value is not None else value


# More columns need no new version: an older llama-corral leaves them empty.
VERSION: Final = 1


class UnusableError(Exception):
    """The file is no database of this version; the message is a clause."""


def prepare(connection: sqlite3.Connection) -> None:
    """Create the table of a new database, or add missing columns; raises UnusableError."""
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise UnusableError(str(damage))
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise UnusableError(f"it has layout {found} of a newer llama-corral, here {VERSION}")
    has = {row[1] for row in connection.execute("PRAGMA table_info(requests)")}
    missing = {name: kind for name, kind in COLUMNS.items() if name not in has}
    if found == VERSION and not missing:
        return  # without writing, so that it can be read on a full disk
    connection.execute("CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY)")
    for name, kind in missing.items():
        default = " DEFAULT 0" if "NOT NULL" in kind else ""
        connection.execute(f"ALTER TABLE requests ADD COLUMN {name} {kind}{default}")
    connection.execute("CREATE INDEX IF NOT EXISTS requests_by_id ON requests (id)")
    connection.execute("CREATE INDEX IF NOT EXISTS requests_by_end ON requests (ended_at)")
    connection.execute(f"PRAGMA user_version = {VERSION}")


_INSERT: Final = (
    f"INSERT INTO requests ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"  # noqa: S608
)
# A tenth of the rows, the oldest.
_DELETE_OLDEST: Final = """
    DELETE FROM requests WHERE seq <= (SELECT min(seq) + (max(seq) - min(seq)) / 10 FROM requests)
"""


def insert(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    connection.executemany(_INSERT, rows)


def prune(connection: sqlite3.Connection, max_bytes: int, oldest_at: float) -> None:
    """Delete requests that ended before `oldest_at`, and the oldest above `max_bytes`."""
    connection.execute("DELETE FROM requests WHERE ended_at < ?", (oldest_at,))
    while _used_bytes(connection) > max_bytes:
        if not connection.execute(_DELETE_OLDEST).rowcount:
            return


def select(connection: sqlite3.Connection, query: HistoryQuery) -> list[StoredRequest]:
    """Return requests, the latest first."""
    conditions = {
        "id = ?": query.request_id,
        "model = ?": query.model,
        "client = ?": query.client,
        "ended_at >= ?": query.since,
        "status >= ?": 400 if query.is_failed else None,
    }
    given = {text: value for text, value in conditions.items() if value is not None}
    where = " AND ".join(given) or "1"
    statement = f"SELECT * FROM requests WHERE {where} ORDER BY seq DESC LIMIT ?"  # noqa: S608 (ours)
    return list(map(request_of, connection.execute(statement, (*given.values(), query.limit))))


def forget(connection: sqlite3.Connection, model: str | None) -> int:
    """Delete the requests of a model, or all; return how many."""
    if model is None:
        return connection.execute("DELETE FROM requests").rowcount
    return connection.execute("DELETE FROM requests WHERE model = ?", (model,)).rowcount


def _used_bytes(connection: sqlite3.Connection) -> int:
    pages, free, page_bytes = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * page_bytes


_EXCLUSIVE: Final = "locking_mode = EXCLUSIVE"  # first, or SQLite makes the shared memory
# Setting `auto_vacuum` of an existing file would write, which a full disk refuses.
_OF_A_NEW_FILE: Final = ("page_size = 4096", "auto_vacuum = FULL")
_PRAGMAS: Final = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "journal_size_limit = 4194304",
    "cache_size = -512",
)
# For a command that reads while the daemon starts.
_LOCK_TIMEOUT_S: Final = 1.0
_UNUSABLE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

Result = TypeVar("Result")


class HistoryFailedError(Exception):
    """The database cannot be used now; the message says why."""


class HistoryDatabase:
    """A database that the first call opens; calls may come from several threads.

    `replacement` has the path and the damage of a replaced file, until it is reported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replacement: tuple[Path, str] | None = None
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do something in one transaction, or write nothing and raise HistoryFailedError."""
        with self._lock:
            try:
                return self._run(work)
            except (sqlite3.Error, UnusableError) as error:
                self._close()
                if not _is_unusable(error):
                    raise HistoryFailedError(f"{self.path}: {error}") from error
                self._replace(str(error))
            except (OSError, AccessDenied) as error:
                raise HistoryFailedError(str(error)) from error
            try:
                return self._run(work)
            except (sqlite3.Error, OSError, AccessDenied, UnusableError) as error:
                self._close()
                raise HistoryFailedError(f"{self.path}: {error}") from error

    def forget(self, model: str | None) -> int:
        """Delete the requests of a model, or all; return how many. Raises HistoryFailedError."""
        if model is None:
            with suppress(OSError):
                self._backup_path.unlink()
        return self.run(lambda connection: forget(connection, model))

    def close(self) -> None:
        with self._lock:
            self._close()

    @property
    def _backup_path(self) -> Path:
        return self.path.with_suffix(".damaged.db")

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._connection is None:
            self._connection = _open_writable(self.path)
        return run_in_transaction(self._connection, work)

    def _replace(self, reason: str) -> None:
        try:
            self.path.replace(self._backup_path)
            self.path.with_name(f"{self.path.name}-wal").unlink(missing_ok=True)
        except OSError as error:
            raise HistoryFailedError(f"{self.path}: {reason}; {error}") from error
        self.replacement = self._backup_path, reason

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _open_writable(path: Path) -> sqlite3.Connection:
    make_private(path.parent)
    # SQLite gives its journal the mode of the database.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    is_new = not os.fstat(descriptor).st_size
    os.close(descriptor)
    connection = sqlite3.connect(
        path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.row_factory = sqlite3.Row
        for pragma in (_EXCLUSIVE, *(_OF_A_NEW_FILE if is_new else ()), *_PRAGMAS):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        run_in_transaction(connection, prepare)
    except BaseException:
        connection.close()
        raise
    return connection


def _is_unusable(error: Exception) -> bool:
    if isinstance(error, UnusableError):
        return True
    # The low byte is the primary code. Source: sqlite.org/rescode.html.
    return isinstance(error, sqlite3.Error) and (error.sqlite_errorcode & 0xFF) in _UNUSABLE


# Number of events that may wait; above it, the oldest are dropped.
_PENDING_MAX: Final = 8192
_RUN_BITS: Final = 48
_DAY_S: Final = 86_400


class HistoryLimits(Protocol):
    """The part of `[history]` in the settings, which this package does not import."""

    @property
    def enabled(self) -> bool: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def max_age_days(self) -> float: ...


class History:
    """Stores the requests of observed events; `limits` returns the current settings.

    Events of the latest `batch_s` are lost if the daemon is killed.
    """

    def __init__(
        self,
        database: HistoryDatabase,
        emit: Emit,
        limits: Callable[[], HistoryLimits],
        *,
        batch_s: float = 1.0,
    ) -> None:
        self._database = database
        self._emit = emit
        self._limits = limits
        self._batch_s = batch_s
        self._run = secrets.randbits(_RUN_BITS)
        self._pending: deque[Event] = deque(maxlen=_PENDING_MAX)
        self._arrived = asyncio.Event()
        self._has_failed = False

    def observe(self, event: Event) -> None:
        """Take an event (a sink of `EventStream`); most are ignored."""
        if event.name in {FINISHED, REJECTED} and self.is_on:
            self._pending.append(event)
            self._arrived.set()

    async def serve(self) -> None:
        """Write until cancelled, and then the rest."""
        try:
            while True:
                await self._arrived.wait()
                await asyncio.sleep(self._batch_s)
                self._arrived.clear()
                await self._flush()
        finally:
            self._write()
            self._database.close()

    @property
    def is_on(self) -> bool:
        return self._limits().enabled

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Return stored requests, the latest first, even just ended; raises HistoryUnavailable."""
        if not self.is_on:
            raise HistoryUnavailable("no history is kept", hint="set enabled = true in [history]")
        return await self._read(
            lambda: self._database.run(lambda connection: select(connection, query))
        )

    async def forget(self, model: str | None) -> int:
        """Delete the requests of a model, or all; return how many. Raises HistoryUnavailable."""
        return await self._read(lambda: self._database.forget(model))

    async def _flush(self) -> None:
        if not (events := self._take_events()):
            return
        try:
            await asyncio.to_thread(self._add, events)
        except HistoryFailedError as error:
            self._report(str(error))
        else:
            self._report(None)

    def _write(self) -> None:
        """Write at once, as the daemon ends."""
        with suppress(HistoryFailedError):
            if events := self._take_events():
                self._add(events)

    def _take_events(self) -> list[Event]:
        events = list(self._pending)
        self._pending.clear()
        return events

    def _add(self, events: Sequence[Event]) -> None:
        rows = [row_of(event, self._run) for event in events]
        limits = self._limits()
        oldest_at = datetime.now(UTC).timestamp() - limits.max_age_days * _DAY_S

        def work(connection: sqlite3.Connection) -> None:
            insert(connection, rows)
            prune(connection, limits.max_bytes, oldest_at)

        self._database.run(work)

    async def _read(self, work: Callable[[], Result]) -> Result:
        await self._flush()
        try:
            return await asyncio.to_thread(work)
        except HistoryFailedError as error:
            raise HistoryUnavailable(f"the history cannot be used: {error}") from error
        finally:
            self._report_replaced()

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row."""
        self._report_replaced()
        if failure and not self._has_failed:
            self._emit("history.write_failed", reason=failure)
        self._has_failed = failure is not None

    def _report_replaced(self) -> None:
        found, self._database.replacement = self._database.replacement, None
        if found:
            self._emit("history.replaced", reason=found[1], kept=str(found[0]))
