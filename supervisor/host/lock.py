"""The lock of the runtime directory, which one daemon holds, and the state file that names it.

A killed daemon leaves its state file behind and loses its lock.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from supervisor.errors import AccessDenied, DaemonBusy
from supervisor.host.files import write_atomic
from supervisor.host.paths import Directories, make_private
from supervisor.host.process_identity import ProcessIdentity, identity_of


@dataclass(frozen=True, slots=True)
class DaemonInfo:
    """The daemon that owns a runtime directory."""

    pid: int
    created_at: float  # seconds since the epoch, as psutil reports it
    version: str
    url: str  # of its proxy
    api_key_file: str | None = None  # of a desktop backend

    def is_alive(self) -> bool:
        return ProcessIdentity(self.pid, self.created_at).is_alive()


def this_daemon(version: str, url: str, api_key_file: Path | None = None) -> DaemonInfo:
    ours = identity_of(os.getpid())
    key_file = str(api_key_file) if api_key_file else None
    return DaemonInfo(ours.pid, ours.created_at, version, url, key_file)


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
