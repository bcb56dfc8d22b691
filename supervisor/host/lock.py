"""The lock of the runtime directory, which one daemon holds, and the state file that names it.

A killed daemon leaves its state file behind and loses its lock. A pid counts only together with the
creation time of its process, because pids are reused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import filelock
import psutil

from supervisor.errors import AccessDenied, DaemonBusy
from supervisor.host.files import write_atomic
from supervisor.host.paths import Directories, make_private

# psutil derives creation times from clock ticks and the boot time, both exact to 10 ms.
_SAME_PROCESS_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """The daemon that owns a runtime directory."""

    pid: int
    created_at: float  # seconds since the epoch, as psutil reports it
    version: str
    url: str  # of its proxy

    def is_alive(self) -> bool:
        try:
            created_at = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return abs(created_at - self.created_at) < _SAME_PROCESS_S


def this_daemon(version: str, url: str) -> DaemonInfo:
    return DaemonInfo(os.getpid(), psutil.Process().create_time(), version, url)


@contextmanager
def lock_runtime_dir(directories: Directories) -> Iterator[None]:
    """Hold the lock of the runtime directory during the block.

    Raises:
        DaemonBusy: Another daemon holds it.
        AccessDenied: The directory cannot be used.
    """
    make_private(directories.runtime)
    lock = filelock.FileLock(directories.lock_file, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise _held(directories) from error
    except OSError as error:
        raise AccessDenied(f"cannot lock {directories.lock_file}: {error.strerror}") from error
    try:
        yield
    finally:
        directories.state_file.unlink(missing_ok=True)
        lock.release()


def _held(directories: Directories) -> DaemonBusy:
    owner = read_owner(directories.state_file)
    identity = f" (pid {owner.pid}, {owner.url})" if owner else ""
    return DaemonBusy(
        f"a daemon already runs in {directories.runtime}{identity}",
        hint="corral status shows it, corral stop ends it",
    )


def write_owner(path: Path, owner: DaemonInfo) -> None:
    write_atomic(path, json.dumps(asdict(owner)), durable=False)


def read_owner(path: Path) -> DaemonInfo | None:
    """Read the state file; None if it is missing or invalid."""
    try:
        return DaemonInfo(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
