"""Writes files that appear whole, and are on the disk before they count."""

from __future__ import annotations

import os
from pathlib import Path


def settle(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk.

    Raises:
        OSError: The disk refused.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """Write a file of ours, 0600, that appears by rename.

    Raises:
        OSError: The disk refused; there is no such file then, or still the one before.
    """
    draft = path.with_suffix(".tmp")
    try:
        with open(draft, "w", encoding="utf-8", opener=_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    settle(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
