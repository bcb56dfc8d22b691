"""What clients are told when the database cannot be used. Pure, but for the size of the disk."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from pathlib import Path
from typing import Final

from proxy.errors import ProxyError, StorageFailed, StorageFull

# A disk with less space free is full.
_DISK_FULL_BYTES: Final = 64 * 1024**2
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_REASONS: Final = {
    sqlite3.SQLITE_BUSY: "another daemon uses it",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_CORRUPT: "it is damaged; move it away",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_NOTADB: "it is not a database; move it away",
    sqlite3.SQLITE_PERM: "no permission",
    sqlite3.SQLITE_READONLY: "it is read-only",
}


def has_full_disk(directory: Path) -> bool:
    """Whether there is little space; a database that is full anyway is so by its own limit."""
    try:
        return shutil.disk_usage(directory).free < _DISK_FULL_BYTES
    except OSError:
        return True


def of_sqlite(error: sqlite3.Error, *, is_disk_full: bool) -> ProxyError | None:
    """The error that clients get; None for a fault of ours."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    # On a full disk, opening the database fails as the disk does.
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and is_disk_full):
        return _no_space(is_at_limit=not is_disk_full)
    if reason := _REASONS.get(code):
        return StorageFailed(f"the database of jobs cannot be used: {reason} ({error})")
    return None


def _no_space(*, is_at_limit: bool) -> StorageFull:
    if is_at_limit:
        return StorageFull(
            "files and results of batches take all of their disk space; "
            "delete files, or raise total_bytes under [jobs]"
        )
    return StorageFull("the disk that holds files and batches is full; free some of its space")


def of_system(error: OSError) -> ProxyError:
    if error.errno in _FULL:
        return _no_space(is_at_limit=False)
    return StorageFailed(f"the database of jobs cannot be used: {error.strerror}")
