"""Small JSON values kept between commands, each a file that may vanish at any time.

What cannot be read, or is not what was written, counts as not kept; what cannot be written is not
kept. Files are 0600 and appear whole under their name.
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
    """Return a key that changes when one of the files is replaced, or one of the texts differs.

    Raises:
        OSError: One of the files cannot be looked at.
    """
    parts = [*more]
    for path in files:
        found = path.stat()
        parts.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def get(directory: Path, key: str) -> dict[str, Any] | None:
    """Return what was kept under a key, or None; also where others could have written it."""
    if not is_ours(directory):
        return None
    try:
        found = json.loads((directory / f"{key}.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def put(directory: Path, key: str, value: Mapping[str, Any]) -> None:
    """Keep a value under a key, where the disk lets us."""
    with contextlib.suppress(OSError, AccessDenied):
        make_ours(directory.parent)
        make_private(directory)
        write_atomic(directory / f"{key}.json", json.dumps(value), durable=False)
