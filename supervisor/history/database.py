"""The database file: mode 0600, written in batches, bounded by size and age.

The lock is exclusive, so no shared memory file is mapped, whose growth on a full disk would end the
process with SIGBUS; commands read through the daemon while one runs. A file that cannot be read is
renamed, and a new one made.

Source: sqlite.org/wal.html, section 8 on WAL without shared memory; sqlite.org/pragma.html.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from proxy.jobs.connection import in_transaction
from supervisor.errors import AccessDenied
from supervisor.history import statements
from supervisor.history.schema import UnusableError, prepare
from supervisor.host.paths import make_private

_EXCLUSIVE: Final = "locking_mode = EXCLUSIVE"  # first, or the shared memory is made
# Of a file that exists, `auto_vacuum` is written again, which a full disk refuses.
_OF_A_NEW_FILE: Final = ("page_size = 4096", "auto_vacuum = FULL")
_PRAGMAS: Final = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "journal_size_limit = 4194304",
    "cache_size = -512",
)
# For a command that reads while the daemon begins.
_LOCK_TIMEOUT_S: Final = 1.0
_UNUSABLE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

Result = TypeVar("Result")


class HistoryFailedError(Exception):
    """The database cannot be used now; the message says why."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that could not be read."""

    kept: Path
    reason: str


class HistoryDatabase:
    """Opened by the first call; calls may come from several threads.

    Attributes:
        set_aside: The file that was replaced, until it is reported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set_aside: SetAside | None = None
        self._connection: sqlite3.Connection | None = None
        self._lock = threading.Lock()

    def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Do something in one transaction.

        Raises:
            HistoryFailedError: Nothing was written.
        """
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
                self._kept.unlink()
        return self.run(lambda connection: statements.forget(connection, model))

    def close(self) -> None:
        with self._lock:
            self._close()

    @property
    def _kept(self) -> Path:
        return self.path.with_suffix(".damaged.db")

    def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._connection is None:
            self._connection = _opened(self.path)
        return in_transaction(self._connection, work)

    def _replace(self, reason: str) -> None:
        try:
            self.path.replace(self._kept)
            _journal(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise HistoryFailedError(f"{self.path}: {reason}; {error}") from error
        self.set_aside = SetAside(self._kept, reason)

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _opened(path: Path) -> sqlite3.Connection:
    make_private(path.parent)
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
        for pragma in (_EXCLUSIVE, *(_OF_A_NEW_FILE if is_new else ()), *_PRAGMAS):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        in_transaction(connection, prepare)
    except BaseException:
        connection.close()
        raise
    return connection


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _is_unusable(error: Exception) -> bool:
    if isinstance(error, UnusableError):
        return True
    # The low byte is the primary code. Source: sqlite.org/rescode.html.
    return isinstance(error, sqlite3.Error) and (error.sqlite_errorcode & 0xFF) in _UNUSABLE
