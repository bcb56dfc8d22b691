"""A cache of small JSON values, one file each, mode 0600.

A value that cannot be read or written counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from supervisor.errors import AccessDenied
from supervisor.host.files import write_atomic
from supervisor.host.paths import is_ours, make_ours, make_private


def key_of(files: Iterable[Path], *more: str) -> str:
    """Return a key made of the versions of files and of texts.

    Raises:
        OSError: A file is missing or inaccessible.
    """
    parts = [*more]
    for path in files:
        found = path.stat()
        parts.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def get(directory: Path, key: str) -> dict[str, Any] | None:
    """Return a value; None if it is missing, or if another user could have written it."""
    if not is_ours(directory):
        return None
    try:
        found = json.loads((directory / f"{key}.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def put(directory: Path, key: str, value: Mapping[str, Any]) -> None:
    """Store a value; errors of the disk are ignored."""
    with contextlib.suppress(OSError, AccessDenied):
        make_ours(directory.parent)
        make_private(directory)
        write_atomic(directory / f"{key}.json", json.dumps(value), durable=False)
