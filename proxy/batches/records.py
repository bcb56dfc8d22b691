"""Records of files and batches in the database, and OpenAI's objects of them. Pure.

Times are Unix time in whole seconds. Source: OpenAI's API reference; openai-python,
`types/file_object.py` and `types/batch.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import orjson

from proxy.errors import BadRequest


def new_id(prefix: str) -> str:
    return prefix + os.urandom(12).hex()


Active = Literal["validating", "in_progress", "finalizing", "cancelling"]
Status = Literal[Active, "completed", "failed", "expired", "cancelled"]
Outcome = Literal["completed", "failed", "expired"]  # of a line
End = Literal["completed", "expired", "cancelled"]

ACTIVE: Final[tuple[Status, ...]] = get_args(Active)
ENDED: Final[tuple[Status, ...]] = tuple(
    status for status in get_args(Status) if status not in ACTIVE
)
COMPLETION_WINDOW: Final = "24h"
WINDOW_S: Final = 86_400


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of requests (`batch`), or the results of a batch."""

    key: int
    id: str
    owner: str  # name of an API key; empty if no key was needed
    # clients see only `ready` files; the rows of others are removed over time
    state: Literal["uploading", "ready", "deleted"]
    filename: str
    size_bytes: int
    created_at: int
    expires_at: int | None
    batch: int | None  # for results: the key of their batch
    is_error: int  # for results: whether this is the error file

    @property
    def purpose(self) -> str:
        return "batch" if self.batch is None else "batch_output"


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch; `errors` and `metadata` are JSON or None; `input_file` is the key of a file."""

    key: int
    id: str
    owner: str
    endpoint: str
    input_file: int
    input_file_id: str
    status: Status
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    completed: int
    failed: int
    errors: str | None
    metadata: str | None
    output_file_id: str | None
    error_file_id: str | None
    output_ttl_s: int | None

    @property
    def is_active(self) -> bool:
        return self.status in ACTIVE


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a file; `number` counts from 1."""

    number: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line of an output or error file, with its end of line."""

    number: int
    outcome: Outcome
    data: bytes


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Parse `limit`; raise BadRequest if it is invalid."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequest(f"limit must be 1 to {most}")
    return int(text)


def order_of(query: Mapping[str, str]) -> Literal["asc", "desc"]:
    """Parse `order`; raise BadRequest if it is invalid."""
    order = query.get("order", "desc")
    if order not in {"asc", "desc"}:
        raise BadRequest("order must be asc or desc")
    return "asc" if order == "asc" else "desc"


_COUNTS: Final = ("total", "completed", "failed")
# Members of OpenAI's object that are columns too.
_MEMBERS: Final = (
    "id", "endpoint", "input_file_id", "status", "output_file_id", "error_file_id",
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at",
)  # fmt: skip


def file_object(file: StoredFile) -> dict[str, Any]:
    names = ("id", "created_at", "expires_at", "filename", "purpose")
    members = {name: getattr(file, name) for name in names}
    members |= {"object": "file", "bytes": file.size_bytes}
    return {**members, "status": "processed", "status_details": None}


def batch_object(batch: Batch, paused: str | None) -> dict[str, Any]:
    """Return a batch; our own member `pause_reason` says why it makes no progress, or None."""
    return {
        **{name: getattr(batch, name) for name in _MEMBERS},
        "object": "batch",
        "errors": batch.errors and orjson.loads(batch.errors),
        "completion_window": COMPLETION_WINDOW,
        "request_counts": {name: getattr(batch, name) for name in _COUNTS},
        "metadata": batch.metadata and orjson.loads(batch.metadata),
        "pause_reason": paused if batch.is_active else None,
    }


def page_object(found: Sequence[object], shown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a page of a list; `found` has one object more than `shown` if the list continues."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > len(shown),
    }
