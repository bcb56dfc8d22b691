"""Results in the database, each function in the transaction of its caller.

A result is stored with its count, and the primary key makes a second one for a line impossible.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from proxy.jobs.batch_rows import of_id
from proxy.jobs.ids import new_id
from proxy.jobs.records import Batch, End, LineResult, Outcome, StoredLine

_END_SQL: Final = {
    "completed": "UPDATE batches SET status = 'completed', completed_at = ? WHERE key = ?",
    "expired": "UPDATE batches SET status = 'expired', expired_at = ? WHERE key = ?",
    "cancelled": "UPDATE batches SET status = 'cancelled', cancelled_at = ? WHERE key = ?",
}


def pending(
    connection: sqlite3.Connection, batch: Batch, after: int, most: int
) -> list[StoredLine]:
    """Lines without a result behind a number; blank ones too."""
    rows = connection.execute(
        "SELECT number, data FROM lines WHERE file = ? AND number > ? AND NOT EXISTS "
        "(SELECT 1 FROM results WHERE batch = ? AND results.number = lines.number) "
        "ORDER BY number LIMIT ?",
        (batch.input_file, after, batch.key, most),
    )
    return [StoredLine(**row) for row in rows]


def store(connection: sqlite3.Connection, key: int, results: Sequence[LineResult]) -> None:
    """Store results and count them; one that a line has already stays as it is."""
    for result in results:
        added = connection.execute(
            "INSERT OR IGNORE INTO results (batch, number, outcome, data) VALUES (?, ?, ?, ?)",
            (key, result.number, result.outcome, result.data),
        )
        if added.rowcount:
            _count(connection, key, result.outcome)


def _count(connection: sqlite3.Connection, key: int, outcome: Outcome) -> None:
    if outcome == "completed":
        connection.execute("UPDATE batches SET completed = completed + 1 WHERE key = ?", (key,))
    else:
        connection.execute("UPDATE batches SET failed = failed + 1 WHERE key = ?", (key,))


def has_expired_lines(connection: sqlite3.Connection, key: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM results WHERE batch = ? AND outcome = 'expired' LIMIT 1", (key,)
    )
    return found.fetchone() is not None


def end(connection: sqlite3.Connection, batch: Batch, status: End, now: int, ttl_s: int) -> Batch:
    """End a batch, and make its files of results exist."""
    expires_at = now + (batch.output_ttl_s or ttl_s)
    for is_error, statement in (
        (0, "UPDATE batches SET output_file_id = ? WHERE key = ?"),
        (1, "UPDATE batches SET error_file_id = ? WHERE key = ?"),
    ):
        if file_id := _add_file(connection, batch, is_error, now, expires_at):
            connection.execute(statement, (file_id, batch.key))
    connection.execute(_END_SQL[status], (now, batch.key))
    return of_id(connection, batch.id)


def _add_file(
    connection: sqlite3.Connection, batch: Batch, is_error: int, now: int, expires_at: int
) -> str | None:
    """Add a file of a batch's results; None where it would be empty."""
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
