"""What is done with the table of requests, each in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from proxy.requests.history import HistoryQuery, StoredRequest
from supervisor.history.columns import COLUMNS, Row, request_of

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
    """Delete what ended before this time, and the oldest above this size."""
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
