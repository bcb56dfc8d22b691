"""The SQLite file of all records: ended requests, usage and the sizes of requests.

The file has mode 0600. Its lock is exclusive, so no shared memory file is mapped, whose growth on a
full disk would end the process with SIGBUS; while a daemon runs, commands ask it. A file that
cannot be read is renamed and replaced; its usage and sizes are copied as far as they can be read.

Its path is that of older versions' history, which becomes this file by further tables. An older
llama-corral uses its `requests` and ignores the others.

Source: sqlite.org/wal.html, section 8 on WAL without shared memory; sqlite.org/pragma.html.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from proxy.batches.database import open_connection, run_in_transaction
from proxy.observe.past import HistoryQuery, RatesQuery
from supervisor.errors import AccessDenied
from supervisor.records import older, requests, usage
from supervisor.records.requests import COLUMNS
from supervisor.records.usage import Account, Usage
from supervisor.system.paths import make_private

# More columns and tables need no new version: an older llama-corral leaves them alone.
VERSION: Final = 1
_INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS requests_by_id ON requests (id)",
    "CREATE INDEX IF NOT EXISTS requests_by_end ON requests (ended_at)",
    requests.SIZES_INDEX,
)
_PRAGMAS: Final = ("synchronous = NORMAL", "journal_size_limit = 4194304", "cache_size = -512")
_UNUSABLE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

# Questions of commands, each with one argument.
QUESTIONS: Final[Mapping[str, tuple[Any, Callable[[sqlite3.Connection, Any], Any]]]] = {
    "requests": (HistoryQuery, requests.select_requests),
    "rates": (RatesQuery, requests.select_rates),
    "cache_rates": (RatesQuery, requests.select_cache_rates),
    "forget_requests": (str | None, requests.forget_requests),
    "usage": (usage.Query, usage.sum_usage),
    "sizes": (str, requests.select_sizes),
    "size_counts": (str | None, requests.count_sizes),
    "forget_sizes": (str | None, requests.forget_sizes),
}

Result = TypeVar("Result")


class RecordsFailedError(Exception):
    """The file cannot be used now; the message says why."""


class _UnusableError(Exception):
    """The file is no database of this version; the message is a clause."""


def _prepare(connection: sqlite3.Connection) -> None:
    """Create the tables of a new file, or add missing tables and columns; raises _UnusableError."""
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise _UnusableError(str(damage))
    found = _version(connection)
    if found > VERSION:
        raise _UnusableError(f"it has layout {found} of a newer llama-corral, here {VERSION}")
    has = {row[1] for row in connection.execute("PRAGMA table_info(requests)")}
    missing = {name: kind for name, kind in COLUMNS.items() if name not in has}
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    if not missing and {"usage", "sizes", "taken_over"} <= tables:
        return  # without writing, so that it can be read on a full disk
    connection.execute("CREATE TABLE IF NOT EXISTS requests (seq INTEGER PRIMARY KEY)")
    for name, kind in missing.items():
        default = " DEFAULT 0" if "NOT NULL" in kind else ""
        connection.execute(f"ALTER TABLE requests ADD COLUMN {name} {kind}{default}")
    for statement in (usage.USAGE_TABLE, requests.SIZES_TABLE, older.TAKEN_TABLE, *_INDEXES):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


# In memory; further accounts are added to that of others.
ACCOUNTS_MAX: Final = 4096
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def journals(directory: Path) -> list[Path]:
    """Return the journals in a directory, the oldest first."""
    return sorted(directory.glob("journal.*.jsonl"))


def _take_over_journals(connection: sqlite3.Connection, files: Iterable[Path]) -> None:
    """Add journals that are not noted yet; raises OSError."""
    noted = {row[0] for row in connection.execute("SELECT file FROM taken_over")}
    connection.execute("DELETE FROM taken_over WHERE file LIKE 'journal.%'")
    sums: dict[Account, Usage] = {}
    for path in files:
        connection.execute("INSERT INTO taken_over VALUES (?)", (path.name,))
        lines = older.read_lines(path) if path.name not in noted else ()
        for row in (row for rows in lines if isinstance(rows, list) for row in rows):
            match row:
                case ["usage", *values]:
                    if found := older.usage_row(values):
                        usage.hold(sums, *found, ACCOUNTS_MAX)
                case [("requests" | "sizes") as table, *values]:
                    requests.insert(connection, table, *values)
    usage.add_usage(connection, sums)


class RecordStore:
    """Records for one thread; the first call opens the file. `problems` are events to emit."""

    def __init__(self, data: Path) -> None:
        self.path = data / "history" / "requests.db"
        self.problems: deque[tuple[str, dict[str, str]]] = deque()
        self._data = data
        self._connection: sqlite3.Connection | None = None
        self._journal: Path | None = None  # the journal that this process writes

    @property
    def exists(self) -> bool:
        files = [*older.older_files(self._data), *journals(self.path.parent)]
        return self.path.exists() or bool(files)

    def answer(self, question: str, asked: object) -> Any:
        """Answer one of QUESTIONS; raises RecordsFailedError."""
        if question == "forget_requests" and asked is None:
            for path in (self._backup_path, _log_path(self._backup_path)):
                with suppress(OSError):
                    path.unlink()
        return self.run(lambda connection: QUESTIONS[question][1](connection, asked))

    def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do something in one transaction, or write nothing and raise RecordsFailedError."""
        try:
            return self._run(work)
        except (sqlite3.Error, _UnusableError) as error:
            self.close()
            if not _is_unusable(error):
                raise self._failure(error) from error
            self._replace(str(error))
        except (OSError, AccessDenied) as error:
            raise RecordsFailedError(str(error)) from error
        try:
            return self._run(work)
        except (sqlite3.Error, OSError, AccessDenied, _UnusableError) as error:
            self.close()
            raise self._failure(error) from error

    def begin_journal(self) -> int:
        """Create the journal that this process goes on with; raises RecordsFailedError."""
        self.run(lambda _: None)  # with its lock, no other process takes the journal over
        try:
            path = self.path.parent / f"journal.{time.time_ns()}.jsonl"
            self._journal, file = path, os.open(path, _NEW, 0o600)
        except OSError as error:
            raise self._failure(error) from error
        return file

    def end_journal(self) -> None:
        self._journal = None

    def take_over(self, prune: Callable[[sqlite3.Connection], None]) -> None:
        """Add all journals but the current one; raises RecordsFailedError."""

        def add(connection: sqlite3.Connection) -> list[Path]:
            files = self._add_journals(connection)
            prune(connection)
            return files

        older.delete(self.run(add))

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()

    @property
    def _backup_path(self) -> Path:
        return self.path.with_suffix(".damaged.db")

    def _failure(self, error: Exception) -> RecordsFailedError:
        is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
        reason = "another process uses it" if is_busy else str(error)
        return RecordsFailedError(f"{self.path}: {reason}")

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._connection is None:
            self._connection = _open(self.path)
            self._take_over(self._connection)
            older.delete(run_in_transaction(self._connection, self._add_journals))
        return run_in_transaction(self._connection, work)

    def _add_journals(self, connection: sqlite3.Connection) -> list[Path]:
        files = [path for path in journals(self.path.parent) if path != self._journal]
        _take_over_journals(connection, files)
        return files

    def _take_over(self, connection: sqlite3.Connection) -> None:
        if not (files := older.older_files(self._data)):
            return
        try:
            damaged = run_in_transaction(connection, lambda _: older.take_over(connection, files))
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # to the disk
            older.delete(files)
        except OSError as error:
            self._note_usage(f"older records cannot be taken over: {error}")
        else:
            if damaged:
                names = ", ".join(path.name for path in damaged)
                self._note_usage(f"damaged and set aside: {names}")

    def _note_usage(self, reason: str) -> None:
        self.problems.append(("usage.record_failed", {"reason": reason}))

    def _replace(self, reason: str) -> None:
        backup = self._backup_path
        try:
            _log_path(backup).unlink(missing_ok=True)
            self.path.replace(backup)
            with suppress(FileNotFoundError):
                _log_path(self.path).replace(_log_path(backup))
            with closing(_open(self.path)) as connection:
                run_in_transaction(connection, lambda _: _salvage(connection, backup))
        except (OSError, sqlite3.Error) as error:
            raise RecordsFailedError(f"{self.path}: {reason}; {error}") from error
        self.problems.append(("history.replaced", {"reason": reason, "kept": str(backup)}))


def _log_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _salvage(connection: sqlite3.Connection, damaged: Path) -> None:
    """Copy usage and sizes until a row cannot be read; nothing of a newer version."""
    with closing(sqlite3.connect(damaged, isolation_level=None)) as old, suppress(sqlite3.Error):
        old.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        if _version(old) > VERSION:
            return
        with suppress(sqlite3.Error):
            for row in old.execute("SELECT * FROM usage"):
                if found := older.usage_row(row):
                    usage.add_usage(connection, dict([found]))
        for _, *row in old.execute("SELECT * FROM sizes NOT INDEXED"):
            requests.insert(connection, "sizes", *row)


def _open(path: Path) -> sqlite3.Connection:
    make_private(path.parent)
    return open_connection(path, _PRAGMAS, _prepare)


def _is_unusable(error: Exception) -> bool:
    if isinstance(error, _UnusableError):
        return True
    # The low byte is the primary code. Source: sqlite.org/rescode.html.
    return isinstance(error, sqlite3.Error) and (error.sqlite_errorcode & 0xFF) in _UNUSABLE
