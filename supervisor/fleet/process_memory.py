"""What processes take of the host's memory."""

from __future__ import annotations

import psutil


def memory_bytes(pid: int) -> int | None:
    """Return the resident memory of a process, or None when it is gone or cannot be read.

    A memory-mapped model counts in full once its pages were touched, and is shared between the
    instances that map the same file.
    """
    try:
        found: int = psutil.Process(pid).memory_info().rss
    except (psutil.Error, OSError):
        return None
    return found


def own_bytes(pid: int) -> int | None:
    """Return the resident memory that a process shares with no file, or None when it is gone.

    Where the system does not tell the two apart, this is all of it.
    """
    try:
        found = psutil.Process(pid).memory_info()
    except (psutil.Error, OSError):
        return None
    own: int = found.rss - getattr(found, "shared", 0)
    return own
