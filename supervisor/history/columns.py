"""What is stored of a request: one column for each field of its event. Pure.

A new figure is a field of `request.finished` (`supervisor.events`) and a line here; a database that
was written before gets the column when it is opened.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from proxy.requests.history import StoredRequest
from supervisor.events import Event

FINISHED: Final = "request.finished"
REJECTED: Final = "request.rejected"

# `run` tells one daemon's numbers of conversations from another's.
_OWN: Final = {"id": "TEXT NOT NULL", "ended_at": "REAL NOT NULL", "run": "INTEGER NOT NULL"}
# Fields of the events that are stored, by their names; with what SQLite keeps them as.
FIGURES: Final[Mapping[str, str]] = {
    "client": "TEXT",
    "path": "TEXT",
    "model": "TEXT",
    "fallback_for": "TEXT",
    "instance": "TEXT",
    "slot": "INTEGER",
    "kind": "TEXT",
    "streamed": "INTEGER",
    "priority": "TEXT",
    "conversation": "INTEGER",
    "diverted": "INTEGER",
    "status": "INTEGER",
    "code": "TEXT",
    "cancelled": "TEXT",
    "attempts": "INTEGER",
    "continued": "INTEGER",
    "duration_ms": "REAL",
    "queued_ms": "REAL",
    "evict_ms": "REAL",
    "load_ms": "REAL",
    "prefill_ms": "REAL",
    "decode_ms": "REAL",
    "stalled_ms": "REAL",
    "other_ms": "REAL",
    "first_byte_ms": "REAL",
    "first_token_ms": "REAL",
    "bytes_out": "INTEGER",
    "expected_cached_tokens": "INTEGER",
    "cached_tokens": "INTEGER",
    "prompt_tokens": "INTEGER",
    "decoded_tokens": "INTEGER",
    "engine_prefill_ms": "REAL",
    "engine_decode_ms": "REAL",
    "drafted_tokens": "INTEGER",
    "accepted_tokens": "INTEGER",
    "cache_cause": "TEXT",
    "cache_tier": "TEXT",
    "cache": "TEXT",
}
COLUMNS: Final[Mapping[str, str]] = {**_OWN, **FIGURES}
_TRUTHS: Final = frozenset({"streamed", "diverted"})
_OBJECTS: Final = frozenset({"cache"})  # as JSON

Row = tuple[object, ...]


def row_of(event: Event, run: int) -> Row:
    """Return the row of a request that ended, in the order of COLUMNS."""
    figures = (_written(name, event.fields.get(name)) for name in FIGURES)
    return (event.fields["request"], event.at.timestamp(), run, *figures)


def request_of(row: Mapping[str, Any]) -> StoredRequest:
    """Return a stored request as clients see it; `ended_at` is ISO 8601 in UTC."""
    found = {name: row[name] for name in COLUMNS if name != "run"}
    found["ended_at"] = datetime.fromtimestamp(row["ended_at"], UTC).isoformat("T", "milliseconds")
    for name in _TRUTHS:
        found[name] = None if row[name] is None else bool(row[name])
    for name in _OBJECTS:
        found[name] = None if row[name] is None else json.loads(row[name])
    return found


def _written(name: str, value: object) -> object:
    return json.dumps(value) if name in _OBJECTS and value is not None else value
