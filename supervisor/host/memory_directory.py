"""Finds a directory whose files are never on a disk.

Their pages may go to the swap space, as those of any program.
Source: proc_pid_mountinfo(5); tmpfs(5).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

_MOUNTS: Final = Path("/proc/self/mountinfo")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (a private directory in it)
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})


def memory_directory(runtime: Path, name: str) -> Path | None:
    """Return where to make a directory in memory; None if this machine has no place.

    That is the runtime directory, else one in /dev/shm that belongs to this runtime directory.
    """
    if is_in_memory(runtime):
        return runtime / name
    if is_in_memory(_SHARED_MEMORY):
        digest = hashlib.sha256(f"{os.geteuid()} {runtime}".encode()).hexdigest()[:16]
        return _SHARED_MEMORY / f"llama-corral-{digest}-{name}"
    return None


def is_in_memory(path: Path) -> bool:
    """Return whether files of a directory, which may be missing yet, are in memory."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        device, mounts = path.stat().st_dev, _MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return False
    return kind_of_device(mounts, f"{os.major(device)}:{os.minor(device)}") in _IN_MEMORY


def kind_of_device(mounts: str, device: str) -> str | None:
    """Return the type of the file system of a device, as `major:minor`."""
    for line in mounts.splitlines():
        words, _, after = line.partition(" - ")
        if words.split()[2:3] == [device]:
            return after.split()[0]
    return None
