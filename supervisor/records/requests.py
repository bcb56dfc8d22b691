"""Ended requests and their sizes, as rows: figures only, never their texts.

`requests` has a column for each field of a request's event. To add a figure, add a field to
`request.finished` (`supervisor.events`) and a line here; an older database gets the column when it
is opened. `sizes` has the requests that `corral bench --workload yours` replays; it names no
client.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import orjson

from proxy.observe.past import HistoryQuery, RatesQuery, StoredRequest
from proxy.upstream.endpoint_kinds import EndpointKind
from supervisor.events import Event

FINISHED: Final = "request.finished"
REJECTED: Final = "request.rejected"

# Stored fields of the events, by their SQLite types.
_BY_TYPE: Final = {
    "TEXT": """
        client path model fallback_for instance kind priority code cancelled cache_cause cache_tier
        cache rules tool_calls load_group
    """,
    "INTEGER": """
        slot streamed conversation diverted status attempts continued yields bytes_out
        expected_cached_tokens cached_tokens prompt_tokens decoded_tokens drafted_tokens
        accepted_tokens
    """,
    "REAL": """
        duration_ms queued_ms evict_ms load_ms slots_ms prefill_ms decode_ms paused_ms stalled_ms
        other_ms first_byte_ms first_token_ms gave_way_ms engine_prefill_ms engine_decode_ms
    """,
}
FIGURES: Final = {name: kind for kind, names in _BY_TYPE.items() for name in names.split()}
# `run` distinguishes the conversation numbers of different daemons.
_OWN: Final = {"id": "TEXT NOT NULL", "ended_at": "REAL NOT NULL", "run": "INTEGER NOT NULL"}
COLUMNS: Final[Mapping[str, str]] = {**_OWN, **FIGURES}
_OBJECTS: Final = ("cache", "tool_calls")
_TRUTHS: Final = frozenset({"streamed", "diverted"})

SIZES_TABLE: Final = """
    CREATE TABLE IF NOT EXISTS sizes (
        seq INTEGER PRIMARY KEY, model TEXT NOT NULL, run INTEGER NOT NULL, conversation INTEGER,
        began_at REAL NOT NULL, ended_at REAL NOT NULL, prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL
    )
"""
SIZES_INDEX: Final = "CREATE INDEX IF NOT EXISTS sizes_by_model ON sizes (model)"
# For each model; `corral bench` replays the latest.
_SIZES_MAX: Final = 12_000
_EMBEDDING: Final = EndpointKind.EMBED_OR_RERANK.name.lower()

# The name of its table, and its values.
Row = tuple[Any, ...]


class RecordedRequest(NamedTuple):
    """The sizes of an answered request."""

    run: int  # differs between daemons; the times of two runs are not comparable
    conversation: int | None  # its number in the run; None if unknown
    began_at: float  # in seconds; so is `ended_at`
    ended_at: float
    prompt_tokens: int  # all tokens of the prompt, including cached ones
    cached_tokens: int
    generated_tokens: int


_INSERT: Final = {
    table: f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608 (ours)
    for table, names in {
        "requests": tuple(COLUMNS),
        "sizes": ("model", *RecordedRequest._fields),
    }.items()
}


def row_of(event: Event, run: int) -> Row:
    """Return the row of an ended request, in the order of COLUMNS, after the table's name."""
    fields = event.fields
    for name in _OBJECTS:
        if fields.get(name) is not None:
            fields = {**fields, name: orjson.dumps(fields[name]).decode()}
    return ("requests", fields["request"], event.at.timestamp(), run, *map(fields.get, FIGURES))


def sizes_rows_of(event: Event, run: int) -> list[Row]:
    """Return the row of a request's sizes; none if it cannot be replayed as a completion."""
    fields: Mapping[str, Any] = event.fields
    is_answered = fields["status"] == HTTPStatus.OK and fields["prompt_tokens"] is not None
    if not is_answered or fields["kind"] == _EMBEDDING:
        return []
    ended_at, cached = event.at.timestamp(), fields["cached_tokens"]
    began_at, prompt = ended_at - fields["duration_ms"] / 1000, fields["prompt_tokens"] + cached
    sizes = RecordedRequest(
        run, fields["conversation"], began_at, ended_at, prompt, cached, fields["decoded_tokens"]
    )
    return [("sizes", fields["model"], *sizes)]


def _decode_row(row: Mapping[str, Any]) -> StoredRequest:
    """Return a stored request for clients; `ended_at` is ISO 8601 in UTC."""
    found = {name: row[name] for name in COLUMNS if name != "run"}
    found["ended_at"] = datetime.fromtimestamp(row["ended_at"], UTC).isoformat("T", "milliseconds")
    for name in _TRUTHS:
        found[name] = None if row[name] is None else bool(row[name])
    for name in _OBJECTS:
        found[name] = None if row[name] is None else orjson.loads(row[name])
    return found


def insert(connection: sqlite3.Connection, table: str, *values: object) -> None:
    """Add a row of `requests` or `sizes`, unless SQLite cannot store it."""
    with suppress(ValueError, OverflowError, sqlite3.IntegrityError, sqlite3.ProgrammingError):
        connection.execute(_INSERT[table], values)


def select_requests(connection: sqlite3.Connection, query: HistoryQuery) -> list[StoredRequest]:
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
    return list(map(_decode_row, connection.execute(statement, (*given.values(), query.limit))))


_RATES: Final = """
    SELECT CAST((ended_at - ?1) / ?2 AS INTEGER) AS number,
           total(decoded_tokens) / ?2, total(prompt_tokens) / ?2, total(queued_ms) / 1000 / ?2,
           avg(first_token_ms) / 1000
    FROM requests WHERE ended_at >= ?1 AND ended_at < ?3 AND (?4 IS NULL OR client = ?4)
    GROUP BY number
"""
_RATE_NAMES: Final = ("tokens_per_second", "prompt_tokens_per_second", "queued", "first_token_s")


def select_rates(connection: sqlite3.Connection, query: RatesQuery) -> dict[str, list[Any]]:
    """Return `RequestHistory.rates`; an interval without requests has no time to a first token."""
    began = query.until - query.interval_s * query.count
    asked = (began, query.interval_s, query.until, query.client)
    found = {row[0]: row[1:] for row in connection.execute(_RATES, asked)}
    rows = [found.get(number, (0, 0, 0, None)) for number in range(query.count)]
    return {name: [row[at] for row in rows] for at, name in enumerate(_RATE_NAMES)}


# A prompt that is too short for a finding was found in its slot; of answers of other machines, the
# tier is not known.
_CACHE_RATES: Final = """
    SELECT model, CAST((ended_at - ?1) / ?2 AS INTEGER),
           total(cached_tokens) FILTER (WHERE cache_tier = 'slot' OR cache IS NULL),
           total(cached_tokens) FILTER (WHERE cache_tier = 'host_cache'),
           total(cached_tokens) FILTER (WHERE cache_tier = 'disk'),
           total(cached_tokens) FILTER (WHERE cache_tier IS NULL AND cache IS NOT NULL),
           total(prompt_tokens), total(json_extract(cache, '$.saved_ms')) / 1000
    FROM requests
    WHERE ended_at >= ?1 AND ended_at < ?3 AND prompt_tokens IS NOT NULL AND kind IS NOT ?4
    GROUP BY 1, 2
"""
_CACHE_RATE_NAMES: Final = ("slot", "host_cache", "disk", "node", "computed", "saved_s")


def select_cache_rates(
    connection: sqlite3.Connection, query: RatesQuery
) -> dict[str, dict[str, list[float]]]:
    """Return `RequestHistory.cache_rates`, of all clients."""
    began = query.until - query.interval_s * query.count
    found: dict[str, dict[str, list[float]]] = {}
    for model, number, *figures in connection.execute(
        _CACHE_RATES, (began, query.interval_s, query.until, _EMBEDDING)
    ):
        if model not in found:
            found[model] = {name: [0.0] * query.count for name in _CACHE_RATE_NAMES}
        for name, figure in zip(_CACHE_RATE_NAMES, figures, strict=True):
            found[model][name][min(number, query.count - 1)] += figure
    return found


def forget_requests(connection: sqlite3.Connection, model: str | None) -> int:
    """Delete the requests of a model, or all; return how many."""
    statement = "DELETE FROM requests WHERE ?1 IS NULL OR model = ?1"
    return connection.execute(statement, (model,)).rowcount


def select_sizes(connection: sqlite3.Connection, model: str) -> list[RecordedRequest]:
    """Return the sizes of a model's requests in the order in which they ended."""
    columns = ", ".join(RecordedRequest._fields)
    statement = f"SELECT {columns} FROM sizes WHERE model = ? ORDER BY seq"  # noqa: S608 (ours)
    return [RecordedRequest(*row) for row in connection.execute(statement, (model,))]


def count_sizes(connection: sqlite3.Connection, model: str | None = None) -> dict[str, int]:
    """Return the number of requests with sizes of a model, or of each."""
    statement = "SELECT model, count(*) FROM sizes WHERE ?1 IS NULL OR model = ?1 GROUP BY model"
    return {str(name): int(count) for name, count in connection.execute(statement, (model,))}


def forget_sizes(connection: sqlite3.Connection, model: str | None) -> dict[str, int]:
    """Delete the sizes of a model's requests, or all; return the number of each model."""
    counts = count_sizes(connection, model)
    connection.execute("DELETE FROM sizes WHERE ?1 IS NULL OR model = ?1", (model,))
    return counts


# A tenth of the rows, the oldest.
_DELETE_OLDEST: Final = """
    DELETE FROM requests WHERE seq <= (SELECT min(seq) + (max(seq) - min(seq)) / 10 FROM requests)
"""


def prune_requests(connection: sqlite3.Connection, max_bytes: int, oldest_at: float) -> None:
    """Delete requests that ended before `oldest_at`, and the oldest above `max_bytes`."""
    connection.execute("DELETE FROM requests WHERE ended_at < ?", (oldest_at,))
    while (used_bytes := _file_bytes(connection)) > max_bytes:
        if used_bytes - _other_bytes(connection) <= max_bytes:
            return
        if not connection.execute(_DELETE_OLDEST).rowcount:
            return


def prune_sizes(connection: sqlite3.Connection) -> None:
    for model in count_sizes(connection):
        connection.execute(
            "DELETE FROM sizes WHERE model = ?1 AND seq <= "
            "(SELECT seq FROM sizes WHERE model = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
            (model, _SIZES_MAX),
        )


def _file_bytes(connection: sqlite3.Connection) -> int:
    pages, free, page_bytes = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * page_bytes


def _other_bytes(connection: sqlite3.Connection) -> int:
    """Estimate the disk space of the other tables: about 100 bytes for each row."""
    statement = "SELECT (SELECT count(*) FROM usage) + (SELECT count(*) FROM sizes)"
    return 100 * int(connection.execute(statement).fetchone()[0])
