"""Batches in the database, each function in the transaction of its caller.

A change of status happens only from the statuses that it may follow, so that a cancellation and
the end of a batch cannot both take place.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from proxy.errors import BadRequest, Conflict, TooManyRequests, quoted
from proxy.jobs import file_rows
from proxy.jobs.ids import new_id
from proxy.jobs.records import WINDOW_S, Batch, NewBatch

_RETRY_AFTER_S: Final = 60


def create(connection: sqlite3.Connection, new: NewBatch, now: int, max_jobs: int) -> Batch:
    """Add a batch.

    Raises:
        BadRequest: Its file does not exist.
        TooManyRequests: Too many batches have not ended.
    """
    file = file_rows.find(connection, new.owner, new.input_file_id)
    if file is None or file.batch is not None:
        raise BadRequest(
            f"there is no file {quoted(new.input_file_id)} with the purpose batch; "
            "upload it with POST /v1/files"
        )
    if active_count(connection, new.owner) >= max_jobs:
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
            *(batch_id, new.owner, new.endpoint, file.key, file.id),
            *(now, now + WINDOW_S, new.metadata, new.output_ttl_s),
        ),
    )
    return of_id(connection, batch_id)


def of_id(connection: sqlite3.Connection, batch_id: str) -> Batch:
    row = connection.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return Batch(**row)


def find(connection: sqlite3.Connection, owner: str, batch_id: str) -> Batch | None:
    row = connection.execute(
        "SELECT * FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)
    ).fetchone()
    return Batch(**row) if row else None


def page(connection: sqlite3.Connection, owner: str, after: str | None, limit: int) -> list[Batch]:
    """The batches older than `after`, newest first, one more than `limit` at most."""
    found = connection.execute("SELECT key FROM batches WHERE id = ?", (after,)).fetchone()
    rows = connection.execute(
        "SELECT * FROM batches WHERE owner = :owner AND (:edge IS NULL OR key < :edge) "
        "ORDER BY key DESC LIMIT :limit",
        {"owner": owner, "edge": found["key"] if found else None, "limit": limit + 1},
    )
    return [Batch(**row) for row in rows]


def active(connection: sqlite3.Connection) -> list[Batch]:
    """The batches that have not ended, oldest first."""
    rows = connection.execute(
        "SELECT * FROM batches WHERE status IN "
        "('validating', 'in_progress', 'finalizing', 'cancelling') ORDER BY key"
    )
    return [Batch(**row) for row in rows]


def active_count(connection: sqlite3.Connection, owner: str) -> int:
    found = connection.execute(
        "SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN "
        "('validating', 'in_progress', 'finalizing', 'cancelling')",
        (owner,),
    )
    return int(found.fetchone()[0])


def begin(connection: sqlite3.Connection, batch_id: str, total: int, now: int) -> Batch:
    """Note that all lines are valid."""
    connection.execute(
        "UPDATE batches SET status = 'in_progress', in_progress_at = ?, total = ? "
        "WHERE id = ? AND status = 'validating'",
        (now, total, batch_id),
    )
    return of_id(connection, batch_id)


def fail(connection: sqlite3.Connection, batch_id: str, errors: str, now: int) -> Batch:
    """Note that lines are invalid; none is computed."""
    connection.execute(
        "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? "
        "WHERE id = ? AND status = 'validating'",
        (now, errors, batch_id),
    )
    return of_id(connection, batch_id)


def cancel(connection: sqlite3.Connection, batch_id: str, now: int) -> Batch:
    """Begin to cancel a batch; nothing where that has begun.

    Raises:
        Conflict: It has ended, or its results are being completed.
    """
    connection.execute(
        "UPDATE batches SET status = 'cancelling', cancelling_at = ? "
        "WHERE id = ? AND status IN ('validating', 'in_progress')",
        (now, batch_id),
    )
    batch = of_id(connection, batch_id)
    if batch.status != "cancelling":
        raise Conflict(f"cannot cancel a batch with the status {batch.status}")
    return batch


def finalize(connection: sqlite3.Connection, batch_id: str, now: int) -> Batch:
    """Note that no line is computed any more, unless the batch is being cancelled."""
    connection.execute(
        "UPDATE batches SET status = 'finalizing', finalizing_at = ? "
        "WHERE id = ? AND status = 'in_progress'",
        (now, batch_id),
    )
    return of_id(connection, batch_id)
