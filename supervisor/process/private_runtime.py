"""Runtime directories of processes that belong to a command and not to the daemon.

Each has a lock, which a killed process loses. The next process that makes a directory removes those
without a lock, with their engines.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import filelock

from supervisor.errors import AccessDenied
from supervisor.host.paths import Directories, make_private
from supervisor.process.orphans import kill_orphans

# Short, because the path of a socket is.
_PARENT: Final = "own"
WORKERS: Final = "workers"
_LOCK: Final = "lock"
# Others hold the lock of all directories for as long as they end engines of killed processes.
_TIMEOUT_S: Final = 20.0


@contextmanager
def private_runtime(directories: Directories, kind: str = _PARENT) -> Iterator[Path]:
    """Make a directory for the block, mode 0700, after removing what killed processes left.

    Args:
        kind: The directory that it lies in: of engines that are measured, or WORKERS.

    Raises:
        AccessDenied: It cannot be made.
    """
    parent = make_private(make_private(directories.runtime) / kind)
    with _locked(parent):
        for old in sorted(parent.iterdir()):
            _remove_stale(old)
        own = make_private(parent / secrets.token_hex(4))
        # A process that looks whether it is in use holds it for a moment.
        lock = _lock(own, _TIMEOUT_S)
        lock.acquire()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        lock.release()


def is_in_use(directories: Directories) -> bool:
    """Whether a process measures an engine now."""
    parent = directories.runtime / _PARENT
    if not parent.is_dir():
        return False
    return any(_is_held(one) for one in parent.iterdir() if one.is_dir())


def _is_held(directory: Path) -> bool:
    try:
        with _lock(directory):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # removed meanwhile
        return False


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        with _lock(directory, _TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise AccessDenied(
            f"cannot lock {directory}: another process has held it for {_TIMEOUT_S:g} s",
            hint="retry when no other `corral bench`, `corral tune` or `corral worker` begins",
        ) from error


def _lock(directory: Path, timeout_s: float = 0) -> filelock.BaseFileLock:
    return filelock.FileLock(directory / _LOCK, timeout=timeout_s, mode=0o600)


def _remove_stale(directory: Path) -> None:
    if not directory.is_dir():  # the lock beside them
        return
    try:
        with _lock(directory):
            kill_orphans(directory, lambda *_args, **_fields: None)
            shutil.rmtree(directory, ignore_errors=True)
    except filelock.Timeout:
        pass  # in use
