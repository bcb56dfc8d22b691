"""The memory of processes."""

from __future__ import annotations

import psutil


def memory_bytes(pid: int) -> int | None:
    """Return the resident memory of a process; None if unknown.

    Includes the touched pages of a memory-mapped model, which instances share.
    """
    try:
        found: int = psutil.Process(pid).memory_info().rss
    except (psutil.Error, OSError):
        return None
    return found


def own_bytes(pid: int) -> int | None:
    """Return the resident memory without mapped files; None if unknown.

    All of it where the system does not report the two apart.
    """
    try:
        found = psutil.Process(pid).memory_info()
    except (psutil.Error, OSError):
        return None
    own: int = found.rss - getattr(found, "shared", 0)
    return own
