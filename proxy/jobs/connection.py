"""The connection to the database: its settings, its file's mode, and its transactions.

The write-ahead log is synchronised with the disk at each commit (`synchronous = FULL`), so a
committed line survives a power failure. The lock is exclusive: two daemons that share a data
directory never compute the same batch, and no shared memory file is mapped, whose growth on a full
disk would end the process with SIGBUS. `max_page_count` bounds the whole database.

Source: sqlite.org/wal.html, section 8 on WAL without shared memory; sqlite.org/pragma.html.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from proxy.jobs.schema import prepare

_PAGE_BYTES: Final = 4096
_LOG_MAX_BYTES: Final = 64 * 1024**2
# For the lock of a daemon that is about to end.
_LOCK_TIMEOUT_S: Final = 1.0

Result = TypeVar("Result")


def in_transaction(
    connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], Result]
) -> Result:
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite rolls back by itself when the disk is full
            connection.execute("ROLLBACK")
        raise
    return result


def open_connection(path: Path, max_bytes: int) -> sqlite3.Connection:
    """Open the database, or create it. Raises sqlite3.Error, OSError or StorageFailed."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # SQLite gives its log the mode of the database.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    os.close(descriptor)
    connection = sqlite3.connect(
        path, timeout=_LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.row_factory = sqlite3.Row
        for pragma in (
            "locking_mode = EXCLUSIVE",  # before the first access, or the shared memory is made
            f"page_size = {_PAGE_BYTES}",
            "auto_vacuum = FULL",
            "journal_mode = WAL",
            "synchronous = FULL",
            f"journal_size_limit = {_LOG_MAX_BYTES}",
            f"max_page_count = {max_bytes // _PAGE_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        in_transaction(connection, prepare)
    except BaseException:
        connection.close()
        raise
    return connection
