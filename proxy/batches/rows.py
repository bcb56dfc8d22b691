"""Queries for files, batches and results; each function runs in its caller's transaction.

A status changes only from the statuses that may precede it, so a cancellation and the end of a
batch cannot both take place. A result is stored together with its count, and the primary key makes
a second result for a line impossible.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from sqlite3 import Connection, Cursor
from typing import Final, Literal

from proxy.batches.records import (
    WINDOW_S,
    Batch,
    End,
    LineResult,
    Status,
    StoredFile,
    StoredLine,
    new_id,
)
from proxy.errors import BadRequest, Conflict, NotFound, TooManyRequests, quote

_PAGE_BYTES: Final = 1024**2
# Rows removed in one transaction; some are large.
_SWEEP_ROWS: Final = 500


def begin_file(connection: Connection, file: tuple[str, str, str, int]) -> int:
    """Begin a file of requests (id, owner, name, created at); return its key."""
    added = connection.execute(
        "INSERT INTO files (id, owner, state, filename, size_bytes, created_at) "
        "VALUES (?, ?, 'uploading', ?, 0, ?)",
        file,
    )
    return int(added.lastrowid or 0)


def add_lines(connection: Connection, key: int, first: int, lines: Iterable[bytes]) -> None:
    connection.executemany(
        "INSERT INTO lines (file, number, data) VALUES (?, ?, ?)",
        ((key, number, line) for number, line in enumerate(lines, first)),
    )


def finish_file(connection: Connection, key: int, size_bytes: int, expires_at: int) -> StoredFile:
    row = connection.execute(
        "UPDATE files SET state = 'ready', size_bytes = ?, expires_at = ? WHERE key = ? "
        "RETURNING *",
        (size_bytes, expires_at, key),
    ).fetchone()
    return StoredFile(**row)


def _select_file(connection: Connection, owner: str, file_id: str) -> StoredFile | None:
    row = connection.execute(
        "SELECT * FROM files WHERE id = ? AND owner = ? AND state = 'ready'", (file_id, owner)
    ).fetchone()
    return StoredFile(**row) if row else None


def find_file(connection: Connection, owner: str, file_id: str) -> StoredFile:
    """Return a file; raises NotFound."""
    if (file := _select_file(connection, owner, file_id)) is None:
        raise NotFound(f"there is no file {quote(file_id)}; GET /v1/files lists them")
    return file


def delete_file(connection: Connection, owner: str, file_id: str) -> None:
    """Delete a file; raises NotFound, or Conflict: a batch reads it."""
    file = find_file(connection, owner, file_id)
    reader = connection.execute(
        "SELECT id FROM batches WHERE input_file = ? "
        "AND status IN ('validating', 'in_progress', 'finalizing', 'cancelling')",
        (file.key,),
    ).fetchone()
    if reader:
        raise Conflict(
            f"{reader['id']} still reads {file_id}; cancel it first, or wait for its end"
        )
    connection.execute("UPDATE files SET state = 'deleted' WHERE key = ?", (file.key,))


def page_of_files(
    connection: Connection,
    owner: str,
    *,
    purpose: str | None,
    after: str | None,
    limit: int,
    order: Literal["asc", "desc"],
) -> list[StoredFile]:
    """Return the files behind `after`, at most one more than `limit`."""
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


def file_content(connection: Connection, file: StoredFile, after: int) -> Sequence[StoredLine]:
    """Return about 1 MiB of a file's lines behind a number; none at its end."""
    if file.batch is None:
        return lines_of(connection, file.key, after)
    return _take_lines(
        connection.execute(
            "SELECT number, data FROM results WHERE batch = ? AND number > ? "
            "AND (outcome != 'completed') = ? ORDER BY number",
            (file.batch, after, file.is_error),
        )
    )


def lines_of(connection: Connection, key: int, after: int) -> list[StoredLine]:
    """Return about 1 MiB of lines behind a number, of the file of requests with this key."""
    return _take_lines(
        connection.execute(
            "SELECT number, data FROM lines WHERE file = ? AND number > ? ORDER BY number",
            (key, after),
        )
    )


def _take_lines(rows: Cursor) -> list[StoredLine]:
    lines, size_bytes = [], 0
    for row in rows:
        lines.append(StoredLine(**row))
        size_bytes += len(row["data"])
        if size_bytes >= _PAGE_BYTES:
            break
    return lines


def used_bytes(connection: Connection) -> int:
    """Return the size of the database, without its log."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    free = connection.execute("PRAGMA freelist_count").fetchone()[0]
    return int(pages - free) * int(connection.execute("PRAGMA page_size").fetchone()[0])


def expire_files(connection: Connection, now: int) -> None:
    """Delete expired files that no batch reads, and old batches without files."""
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


def sweep_files(connection: Connection, uploading: Collection[str]) -> bool:
    """Remove some rows of files that clients cannot see; return whether more may be left.

    `uploading` has the ids of files that are being written.
    """
    gone = connection.execute("SELECT * FROM files WHERE state != 'ready' ORDER BY key").fetchall()
    file = next((StoredFile(**row) for row in gone if row["id"] not in uploading), None)
    if file is None:
        return False
    if _remove(connection, file) < _SWEEP_ROWS:
        connection.execute("DELETE FROM files WHERE key = ?", (file.key,))
    return True


def _remove(connection: Connection, file: StoredFile) -> int:
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


_RETRY_AFTER_S: Final = 60


def create_batch(  # noqa: PLR0913 (the columns of a new row)
    connection: Connection,
    owner: str,
    endpoint: str,
    input_file_id: str,
    metadata: str | None,
    output_ttl_s: int | None,
    *,
    now: int,
    max_jobs: int,
) -> Batch:
    """Add a batch.

    Raises:
        BadRequest: Its file does not exist.
        TooManyRequests: Too many batches have not ended.
    """
    file = _select_file(connection, owner, input_file_id)
    if file is None or file.batch is not None:
        raise BadRequest(
            f"there is no file {quote(input_file_id)} with the purpose batch; "
            "upload it with POST /v1/files"
        )
    active = connection.execute(
        "SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN "
        "('validating', 'in_progress', 'finalizing', 'cancelling')",
        (owner,),
    )
    if active.fetchone()[0] >= max_jobs:
        raise TooManyRequests(
            f"{max_jobs} batches have not ended, the limit of a client (max_jobs under [jobs]); "
            "wait until one ends, or cancel one",
            _RETRY_AFTER_S,
        )
    batch_id = new_id("batch_")
    connection.execute(
        "INSERT INTO batches (id, owner, endpoint, input_file, input_file_id, status, created_at, "
        "expires_at, metadata, output_ttl_s) VALUES (?, ?, ?, ?, ?, 'validating', ?, ?, ?, ?)",
        (
            *(batch_id, owner, endpoint, file.key, file.id),
            *(now, now + WINDOW_S, metadata, output_ttl_s),
        ),
    )
    return batch_of_id(connection, batch_id)


def batch_of_id(connection: Connection, batch_id: str) -> Batch:
    row = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return Batch(**row)


def find_batch(connection: Connection, owner: str, batch_id: str) -> Batch:
    """Return a batch; raises NotFound."""
    row = connection.execute(
        "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
    ).fetchone()
    if row is None:
        raise NotFound(f"there is no batch {quote(batch_id)}; GET /v1/batches lists them")
    return Batch(**row)


def page_of_batches(
    connection: Connection, owner: str, after: str | None, limit: int
) -> list[Batch]:
    """Return the batches older than `after`, newest first, at most one more than `limit`."""
    found = connection.execute("SELECT key FROM batches WHERE id = ?", (after,)).fetchone()
    rows = connection.execute(
        "SELECT * FROM batches WHERE owner = :owner AND (:edge IS NULL OR key < :edge) "
        "ORDER BY key DESC LIMIT :limit",
        {"owner": owner, "edge": found["key"] if found else None, "limit": limit + 1},
    )
    return [Batch(**row) for row in rows]


def active_batches(connection: Connection) -> list[Batch]:
    """Return the batches that have not ended, oldest first."""
    rows = connection.execute(
        "SELECT * FROM batches WHERE status IN "
        "('validating', 'in_progress', 'finalizing', 'cancelling') ORDER BY key"
    )
    return [Batch(**row) for row in rows]


# The statuses from which a batch may change to a status.
_BEFORE: Final[Mapping[Status, tuple[Status, ...]]] = {
    "in_progress": ("validating",),
    "failed": ("validating",),
    "cancelling": ("validating", "in_progress"),
    "finalizing": ("in_progress",),
    "completed": ("finalizing",),
    "expired": ("validating", "finalizing"),  # validating: its lines were never computed
    "cancelled": ("cancelling",),
}


def set_status(
    connection: Connection, batch_id: str, status: Status, now: int, /, **more: object
) -> Batch:
    """Change the status, unless the present one forbids it, and `more` columns of a batch."""
    columns = ", ".join(f"{name} = ?" for name in ("status", f"{status}_at", *more))
    before = ", ".join("?" * len(_BEFORE[status]))
    connection.execute(
        f"UPDATE batches SET {columns} WHERE id = ? AND status IN ({before})",  # noqa: S608 (names of ours)
        (status, now, *more.values(), batch_id, *_BEFORE[status]),
    )
    return batch_of_id(connection, batch_id)


def cancel_batch(connection: Connection, owner: str, batch_id: str, now: int) -> Batch:
    """Begin to cancel a batch, unless that has begun.

    Raises NotFound, or Conflict: it has ended, or is finalizing.
    """
    find_batch(connection, owner, batch_id)
    batch = set_status(connection, batch_id, "cancelling", now)
    if batch.status != "cancelling":
        raise Conflict(f"cannot cancel a batch with the status {batch.status}")
    return batch


def pending_lines(connection: Connection, batch: Batch, after: int, most: int) -> list[StoredLine]:
    """Return lines without a result behind a number, including blank lines."""
    rows = connection.execute(
        "SELECT number, data FROM lines WHERE file = ? AND number > ? AND NOT EXISTS "
        "(SELECT 1 FROM results WHERE batch = ? AND results.number = lines.number) "
        "ORDER BY number LIMIT ?",
        (batch.input_file, after, batch.key, most),
    )
    return [StoredLine(**row) for row in rows]


def store_result(connection: Connection, key: int, results: Sequence[LineResult]) -> None:
    """Store results and count them; existing results are kept."""
    for result in results:
        added = connection.execute(
            "INSERT OR IGNORE INTO results (batch, number, outcome, data) VALUES (?, ?, ?, ?)",
            (key, result.number, result.outcome, result.data),
        )
        if added.rowcount:
            is_completed = result.outcome == "completed"
            connection.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ? WHERE key = ?",
                (is_completed, not is_completed, key),
            )


def has_expired_lines(connection: Connection, key: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM results WHERE batch = ? AND outcome = 'expired' LIMIT 1", (key,)
    )
    return found.fetchone() is not None


def end_batch(connection: Connection, batch: Batch, status: End, now: int, ttl_s: int) -> Batch:
    """End a batch, and create its result files."""
    expires_at = now + (batch.output_ttl_s or ttl_s)
    output, errors = (
        _add_file(connection, batch, is_error, now, expires_at) for is_error in (0, 1)
    )
    return set_status(
        connection, batch.id, status, now, output_file_id=output, error_file_id=errors
    )


def _add_file(
    connection: Connection, batch: Batch, is_error: int, now: int, expires_at: int
) -> str | None:
    size_bytes = connection.execute(
        "SELECT SUM(LENGTH(data)) FROM results WHERE batch = ? AND (outcome != 'completed') = ?",
        (batch.key, is_error),
    ).fetchone()[0]
    if not size_bytes:
        return None
    file_id = new_id("file-")
    name = f"{batch.id}_{'error' if is_error else 'output'}.jsonl"
    connection.execute(
        "INSERT INTO files (id, owner, state, filename, size_bytes, created_at, expires_at, batch, "
        "is_error) VALUES (?, ?, 'ready', ?, ?, ?, ?, ?, ?)",
        (file_id, batch.owner, name, size_bytes, now, expires_at, batch.key, is_error),
    )
    return file_id
