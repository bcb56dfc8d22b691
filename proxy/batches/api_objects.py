"""OpenAI's objects of files and batches, and the query parameters of lists. Pure.

Source: OpenAI's API reference; openai-python, `types/file_object.py` and `types/batch.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from proxy.batches.records import COMPLETION_WINDOW, Batch, StoredFile
from proxy.errors import BadRequest


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Parse `limit`; raise BadRequest if it is invalid."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 9 and 1 <= int(text) <= most):
        raise BadRequest(f"limit must be 1 to {most}")
    return int(text)


def order_of(query: Mapping[str, str]) -> Literal["asc", "desc"]:
    """Parse `order`; raise BadRequest if it is invalid."""
    match query.get("order", "desc"):
        case "asc":
            return "asc"
        case "desc":
            return "desc"
    raise BadRequest("order must be asc or desc")


_TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at"),
    *("expired_at", "cancelling_at", "cancelled_at"),
)


def file_object(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.size_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch, paused: str | None) -> dict[str, Any]:
    """Return a batch; our own member `pause_reason` says why it makes no progress, or None."""
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": batch.errors and orjson.loads(batch.errors),
        "input_file_id": batch.input_file_id,
        "completion_window": COMPLETION_WINDOW,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        **{name: getattr(batch, name) for name in _TIMES},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
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
