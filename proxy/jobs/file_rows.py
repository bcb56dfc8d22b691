"""Files in the database, each function in the transaction of its caller."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal

from proxy.errors import Conflict
from proxy.jobs.records import StoredFile, StoredLine

_PAGE_BYTES: Final = 1024**2
# Rows removed in one transaction, some of them large.
_SWEEP_ROWS: Final = 500


def begin(connection: sqlite3.Connection, file: tuple[str, str, str, int]) -> int:
    """Begin a file of requests (id, owner, name, created at); return its key."""
    added = connection.execute(
        "INSERT INTO files (id, owner, state, filename, size_bytes, created_at) "
        "VALUES (?, ?, 'uploading', ?, 0, ?)",
        file,
    )
    return int(added.lastrowid or 0)


def add_lines(connection: sqlite3.Connection, key: int, first: int, lines: Iterable[bytes]) -> None:
    connection.executemany(
        "INSERT INTO lines (file, number, data) VALUES (?, ?, ?)",
        ((key, number, line) for number, line in enumerate(lines, first)),
    )


def finish(connection: sqlite3.Connection, key: int, size_bytes: int, expires_at: int) -> None:
    """Make a file exist for clients."""
    connection.execute(
        "UPDATE files SET state = 'ready', size_bytes = ?, expires_at = ? WHERE key = ?",
        (size_bytes, expires_at, key),
    )


def abandon(connection: sqlite3.Connection, key: int) -> None:
    connection.execute("UPDATE files SET state = 'deleted' WHERE key = ?", (key,))


def find(connection: sqlite3.Connection, owner: str, file_id: str) -> StoredFile | None:
    row = connection.execute(
        "SELECT * FROM files WHERE id = ? AND owner = ? AND state = 'ready'", (file_id, owner)
    ).fetchone()
    return StoredFile(**row) if row else None


def delete(connection: sqlite3.Connection, owner: str, file_id: str) -> StoredFile | None:
    """Delete a file; return it, or None where there is none.

    Raises:
        Conflict: A batch reads it.
    """
    file = find(connection, owner, file_id)
    if file is None:
        return None
    if reader := _reader(connection, file.key):
        raise Conflict(f"{reader} still reads {file_id}; cancel it first, or wait for its end")
    abandon(connection, file.key)
    return file


def _reader(connection: sqlite3.Connection, key: int) -> str | None:
    """The id of a batch that has not ended and reads a file."""
    row = connection.execute(
        "SELECT id FROM batches WHERE input_file = ? "
        "AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
        (key,),
    ).fetchone()
    return str(row["id"]) if row else None


def page(
    connection: sqlite3.Connection,
    owner: str,
    *,
    purpose: str | None,
    after: str | None,
    limit: int,
    order: Literal["asc", "desc"],
) -> list[StoredFile]:
    """The files behind `after`, one more than `limit` at most."""
    is_input = {None: None, "batch": 1, "batch_output": 0}.get(purpose, -1)
    found = connection.execute("SELECT key FROM files WHERE id = ?", (after,)).fetchone()
    edge = found["key"] if found else None
    sign = -1 if order == "desc" else 1
    rows = connection.execute(
        "SELECT * FROM files WHERE owner = :owner AND state = 'ready' "
        "AND (:is_input IS NULL OR (batch IS NULL) = :is_input) "
        "AND (:edge IS NULL OR key * :sign > :edge * :sign) ORDER BY key * :sign LIMIT :limit",
        {"owner": owner, "is_input": is_input, "edge": edge, "sign": sign, "limit": limit + 1},
    )
    return [StoredFile(**row) for row in rows]


def content(connection: sqlite3.Connection, file: StoredFile, after: int) -> Sequence[StoredLine]:
    """Lines of a file behind a number, about 1 MiB of them; none at its end."""
    if file.batch is None:
        return lines_of(connection, file.key, after)
    return _some(
        connection.execute(
            "SELECT number, data FROM results WHERE batch = ? AND number > ? "
            "AND (outcome != 'completed') = ? ORDER BY number",
            (file.batch, after, file.is_error),
        )
    )


def lines_of(connection: sqlite3.Connection, key: int, after: int) -> list[StoredLine]:
    """As `content`, of the file of requests with this key."""
    return _some(
        connection.execute(
            "SELECT number, data FROM lines WHERE file = ? AND number > ? ORDER BY number",
            (key, after),
        )
    )


def _some(rows: sqlite3.Cursor) -> list[StoredLine]:
    lines, size_bytes = [], 0
    for row in rows:
        lines.append(StoredLine(**row))
        size_bytes += len(row["data"])
        if size_bytes >= _PAGE_BYTES:
            break
    return lines


def used_bytes(connection: sqlite3.Connection) -> int:
    """The size of the database, without its log."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return int(pages - free) * int(connection.execute("PRAGMA page_size").fetchone()[0])


def expire(connection: sqlite3.Connection, now: int) -> None:
    """Delete the files whose time is over and that no batch reads, and batches without files."""
    connection.execute(
        "UPDATE files SET state = 'deleted' WHERE state = 'ready' AND expires_at <= ? "
        "AND key NOT IN (SELECT input_file FROM batches "
        "WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling'))",
        (now,),
    )
    connection.execute(
        "DELETE FROM batches WHERE status IN ('completed', 'failed', 'expired', 'cancelled') "
        "AND created_at <= ? AND NOT EXISTS (SELECT 1 FROM files WHERE state = 'ready' "
        "AND (files.batch = batches.key OR files.key = batches.input_file))",
        (now - 30 * 86_400,),
    )


def sweep(connection: sqlite3.Connection, uploading: Collection[str]) -> bool:
    """Remove some rows of files that do not exist for clients; return whether any are left.

    Args:
        connection: The database.
        uploading: The ids of files that are being written.
    """
    gone = connection.execute("SELECT * FROM files WHERE state != 'ready' ORDER BY key").fetchall()
    file = next((StoredFile(**row) for row in gone if row["id"] not in uploading), None)
    if file is None:
        return False
    if _remove(connection, file) < _SWEEP_ROWS:
        connection.execute("DELETE FROM files WHERE key = ?", (file.key,))
    return True


def _remove(connection: sqlite3.Connection, file: StoredFile) -> int:
    if file.batch is None:
        return connection.execute(
            "DELETE FROM lines WHERE rowid IN (SELECT rowid FROM lines WHERE file = ? LIMIT ?)",
            (file.key, _SWEEP_ROWS),
        ).rowcount
    return connection.execute(
        "DELETE FROM results WHERE rowid IN (SELECT rowid FROM results WHERE batch = ? "
        "AND (outcome != 'completed') = ? LIMIT ?)",
        (file.batch, file.is_error, _SWEEP_ROWS),
    ).rowcount
