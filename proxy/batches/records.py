"""Records of files and batches in the database; times are Unix time in whole seconds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal, get_args


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
