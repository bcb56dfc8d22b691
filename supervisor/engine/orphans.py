"""Kills engines that a dead daemon left behind; runtime directories of processes of a command.

Kills engines that a dead daemon left behind, and no other process. Engines die with their daemon
(see `child.py`), so there is rarely one: an engine in a set-user-ID wrapper, on a system without
the parent-death signal, or one that was loading there. It holds memory and the socket.

A process is killed only if it is our user's, leads its own session, is not our child, carries this
runtime directory (whose lock we hold, so its daemon is dead) in its environment, and runs the
program named there. It is held from the check to the signal, so that a reused process number is
never signalled.

Source: proc(5) /proc/PID/environ, setsid(2).

Runtime directories of processes that belong to a command and not to the daemon. Each has a lock,
which a killed process loses. The next process that makes a directory removes those without a lock,
with their engines.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import filelock
import psutil

from supervisor.engine.launch import PROCESS_TAG_ENV, ProcessTag
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.system.daemon_lock import hold_process
from supervisor.system.paths import Directories, make_private

# A killed process ends at once, unless it is stuck in a driver.
_END_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class OrphanEngine:
    """An engine without a daemon, created at `since`."""

    pid: int
    instance: str
    since: datetime


def kill_orphans(runtime: Path, emit: Emit) -> tuple[OrphanEngine, ...]:
    """Kill every engine that a dead daemon of this runtime directory left; return them.

    Call it while holding the directory's lock, before anything is spawned. Blocks for up to 2 s for
    each engine.
    """
    return tuple(
        orphan for pid in psutil.pids() if (orphan := _kill_orphan(pid, runtime, emit)) is not None
    )


def _kill_orphan(pid: int, runtime: Path, emit: Emit) -> OrphanEngine | None:
    if prove(pid, runtime) is None:
        return None
    with hold_process(pid) as kill:
        # Checked again: only now its number cannot be reused.
        orphan = prove(pid, runtime) if kill else None
        if orphan is None or kill is None:
            return None
        with suppress(ProcessLookupError):
            # Its group first: while the leader lives, the group's number is not reused.
            os.killpg(pid, signal.SIGKILL)
        kill(_END_TIMEOUT_S)
    emit(
        "engine.orphan_killed",
        instance=orphan.instance,
        pid=pid,
        since=orphan.since.isoformat(timespec="seconds"),
    )
    return orphan


def prove(pid: int, runtime: Path) -> OrphanEngine | None:
    """Return the orphan that a process certainly is, or None."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid() or process.ppid() == os.getpid():
            return None
        marker = ProcessTag.read(process.environ().get(PROCESS_TAG_ENV, ""))
        if marker is None or marker.runtime != runtime or os.getsid(pid) != pid:
            return None
        runs_program = process.cmdline()[:1] == [str(marker.program)]
        since = datetime.fromtimestamp(process.create_time(), UTC)
        return OrphanEngine(pid, marker.instance, since) if runs_program else None
    except (psutil.Error, OSError):
        return None  # gone or inaccessible


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
    with _lock_runtime(parent):
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
    return any(_is_held(directory) for directory in parent.iterdir() if directory.is_dir())


def _is_held(directory: Path) -> bool:
    try:
        with _lock(directory):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # removed meanwhile
        return False


@contextmanager
def _lock_runtime(directory: Path) -> Iterator[None]:
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
