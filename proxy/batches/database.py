"""The SQLite database of jobs: one connection in its own thread, one transaction per call.

The write-ahead log is synchronised with the disk at each commit (`synchronous = FULL`), so a
committed line survives a power failure. The lock is exclusive: two daemons that share a data
directory never compute the same batch, and no shared memory file is mapped, whose growth on a full
disk would end the process with SIGBUS. `max_page_count` bounds the whole database.

A result is stored once, by its primary key; a batch's result files are read from the table of
results, so nothing is copied when a batch ends. Lines keep their end of line: a file is the sum of
its lines.

Source: sqlite.org/wal.html, section 8 on WAL without shared memory; sqlite.org/pragma.html.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from sqlite3 import Connection
from typing import Concatenate, Final, ParamSpec, TypeVar

from attrs import define, field

from proxy.common.background_tasks import worker_threads
from proxy.errors import Draining, ProxyError, StorageFailed, StorageFull

VERSION: Final = 1


def prepare(connection: Connection) -> None:
    """Create the tables of a new database. Raises StorageFailed: a newer version wrote it."""
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if found > VERSION:
        raise StorageFailed(
            f"the database of jobs was written by a newer llama-corral (layout {found}, "
            f"here {VERSION}); update llama-corral, or move the database away"
        )
    if found == VERSION:
        return
    for statement in Path(__file__).with_suffix(".sql").read_text("utf-8").split(";"):
        connection.execute(statement)


_PAGE_BYTES: Final = 4096
# Time to wait for the lock of a daemon that is about to end.
_LOCK_TIMEOUT_S: Final = 1.0

Result = TypeVar("Result")
P = ParamSpec("P")


def run_in_transaction(connection: Connection, work: Callable[[Connection], Result]) -> Result:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite itself rolls back if the disk is full
            connection.execute("ROLLBACK")
        raise
    return result


def open_connection(
    path: Path, pragmas: Iterable[str], prepare: Callable[[Connection], None]
) -> Connection:
    """Open or create a database of mode 0600 with an exclusive lock and a write-ahead log.

    Raises sqlite3.Error, OSError, or an error of `prepare`, which runs in a transaction.
    """
    # SQLite gives its log the mode of the database.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    is_new = not os.fstat(descriptor).st_size
    os.close(descriptor)
    connection = sqlite3.connect(
        path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.row_factory = sqlite3.Row
        # The lock before the first access: no shared memory. An existing file stays as it is,
        # which a full disk permits.
        shape = (f"page_size = {_PAGE_BYTES}", "auto_vacuum = FULL") if is_new else ()
        for pragma in ("locking_mode = EXCLUSIVE", *shape, "journal_mode = WAL", *pragmas):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        run_in_transaction(connection, prepare)
    except BaseException:
        connection.close()
        raise
    return connection


# A disk with less free space counts as full.
_DISK_FULL_BYTES: Final = 64 * 1024**2
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_DISK_FULL: Final = "the disk that holds files and batches is full; free some of its space"
_REASONS: Final = {
    sqlite3.SQLITE_BUSY: "another daemon uses it",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged; move it away",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_NOTADB: "it is not a database; move it away",
    sqlite3.SQLITE_PERM: "no permission",
    sqlite3.SQLITE_READONLY: "it is read-only",
}


def storage_failure(error: sqlite3.Error | OSError, directory: Path) -> ProxyError | None:
    """Return the error for clients, None for a fault of ours."""
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return StorageFull(_DISK_FULL)
        return StorageFailed(f"the database of jobs cannot be used: {error.strerror}")
    try:
        is_disk_full = shutil.disk_usage(directory).free < _DISK_FULL_BYTES
    except OSError:
        is_disk_full = True
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    # On a full disk, opening the database fails with an I/O error.
    if is_disk_full and code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}:
        return StorageFull(_DISK_FULL)
    if code == sqlite3.SQLITE_FULL:
        return StorageFull(
            "files and results of batches take all of their disk space; "
            "delete files, or raise total_bytes under [jobs]"
        )
    if reason := _REASONS.get(code):
        return StorageFailed(f"the database of jobs cannot be used: {reason} ({error})")
    return None


# Pauses between two attempts while the disk is full.
_RETRY_MAX_S: Final = 15.0


@define(eq=False, slots=False)
class Database:
    """The database; the first call opens it and creates it if needed.

    Args:
        retry_first_s: The first pause between two attempts while the disk is full; it doubles.
        on_failure: Called with the reason when it can no longer be used, and with None when it
            was written again.

    Attributes:
        failure: Why it cannot be used, or None.
    """

    path: Path
    _max_bytes: int
    _on_failure: Callable[[str | None], None]
    _retry_first_s: float = 1.0
    failure: str | None = field(default=None, init=False)
    _connection: Connection | None = field(default=None, init=False)
    _is_closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = worker_threads(1, "jobs")

    @property
    def exists(self) -> bool:
        return self.path.exists()

    async def run(
        self, work: Callable[Concatenate[Connection, P], Result], *args: P.args, **more: P.kwargs
    ) -> Result:
        """Call `work` with the connection and its other arguments, in a transaction.

        Raises:
            StorageFull: There is no space left; nothing was written.
            StorageFailed: The database cannot be used; nothing was written.
        """
        if self._is_closed:
            raise Draining("the server is stopping; retry later")
        loop = asyncio.get_running_loop()
        try:
            result, is_changed = await loop.run_in_executor(
                self._thread, self._transaction, lambda connection: work(connection, *args, **more)
            )
        except (StorageFull, StorageFailed) as error:
            self._note(error.message)
            raise
        if is_changed:
            self._note(None)
        return result

    async def run_until_done(
        self, work: Callable[Concatenate[Connection, P], Result], *args: P.args, **more: P.kwargs
    ) -> Result:
        """Call `work` as `run` does; while that fails, try again after growing pauses."""
        pause_s = self._retry_first_s
        while True:
            try:
                return await self.run(work, *args, **more)
            except (StorageFull, StorageFailed):
                await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RETRY_MAX_S)

    def close(self, *, wait: bool = False) -> None:
        """Close the database after all begun calls; further calls raise Draining.

        It returns at once, unless it is to wait until the database is closed.
        """
        if not self._is_closed:
            self._is_closed = True
            self._thread.submit(self._close)
        self._thread.shutdown(wait=wait)

    def _note(self, failure: str | None) -> None:
        if (failure is None) != (self.failure is None):
            self._on_failure(failure)
        self.failure = failure

    # In the database's thread.

    def _transaction(self, work: Callable[[Connection], Result]) -> tuple[Result, bool]:
        """Run `work`; return its result, and whether it changed a row."""
        try:
            if self._connection is None:
                self._connection = self._open()
            before = self._connection.total_changes
            result = run_in_transaction(self._connection, work)
            is_changed = self._connection.total_changes != before
        except (sqlite3.Error, OSError) as error:
            failure = storage_failure(error, self.path.parent)
            if failure is None:
                raise
            if isinstance(failure, StorageFailed):
                self._close()  # the next call opens it again
            raise failure from error
        return result, is_changed

    def _open(self) -> Connection:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        pragmas = (
            "synchronous = FULL",
            f"journal_size_limit = {64 * 1024**2}",
            f"max_page_count = {self._max_bytes // _PAGE_BYTES}",
        )
        return open_connection(self.path, pragmas, prepare)

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
