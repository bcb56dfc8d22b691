"""Kills engines that a dead daemon left behind; runtime directories for the engines of commands.

Engines die with their daemon (see `child.py`), so orphans are rare: an engine in a set-user-ID
wrapper, or one that was loading on a system without the parent-death signal. They hold memory and
the socket.

A process is killed only if it is our user's, leads its own session, is not our child, carries this
runtime directory (whose lock we hold, so its daemon is dead) in its environment, and runs the
program named there. It is held from the check to the signal, so that a reused process number is
never signalled.

Engines of a command, not of the daemon, have a separate runtime directory with a lock, which a
killed process loses. The next command that makes such a directory removes directories without a
lock, and kills their engines.

Source: proc(5) /proc/PID/environ, setsid(2).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import filelock
import psutil

from supervisor.engine.launch import PROCESS_TAG_ENV
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.system.daemon_lock import hold_process
from supervisor.system.paths import Directories, make_private

# A killed process ends at once, unless it is stuck in a driver.
_END_TIMEOUT_S: Final = 2.0


# An engine without a daemon: its pid, its instance, and when it was created.
OrphanEngine = tuple[int, str, datetime]


def kill_orphans(runtime: Path, emit: Emit) -> tuple[OrphanEngine, ...]:
    """Kill and return every engine that a dead daemon of this runtime directory left.

    Call it while holding the directory's lock, before anything is spawned. Blocks for up to 2 s per
    engine.
    """
    return tuple(
        orphan for pid in psutil.pids() if (orphan := _kill_orphan(pid, runtime, emit)) is not None
    )


def _kill_orphan(pid: int, runtime: Path, emit: Emit) -> OrphanEngine | None:
    if prove(pid, runtime) is None:
        return None
    with hold_process(pid) as kill:
        # Checked again, because only now its number cannot be reused.
        orphan = prove(pid, runtime) if kill else None
        if orphan is None or kill is None:
            return None
        with suppress(ProcessLookupError):
            # The group first: while the leader lives, the group's number is not reused.
            os.killpg(pid, signal.SIGKILL)
        kill(_END_TIMEOUT_S)
    since = orphan[2].isoformat(timespec="seconds")
    emit("engine.orphan_killed", instance=orphan[1], pid=pid, since=since)
    return orphan


def prove(pid: int, runtime: Path) -> OrphanEngine | None:
    """Return the process as an orphan, or None if it may be anything else."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid() or process.ppid() == os.getpid():
            return None
        tag = process.environ().get(PROCESS_TAG_ENV, "").split("\n")
        if len(tag) != 3 or Path(tag[0]) != runtime or os.getsid(pid) != pid:
            return None
        _, instance, program = tag
        runs_program = process.cmdline()[:1] == [program]
        since = datetime.fromtimestamp(process.create_time(), UTC)
    except (psutil.Error, OSError):
        return None  # gone or inaccessible
    return (pid, instance, since) if runs_program else None


# Short, because the path of a socket has a short limit.
_PARENT: Final = "own"
WORKERS: Final = "workers"
_LOCK: Final = "lock"
# Another command holds the lock of all directories while it ends engines of killed commands.
_TIMEOUT_S: Final = 20.0


@contextmanager
def private_runtime(directories: Directories, kind: str = _PARENT) -> Iterator[Path]:
    """Make a directory of mode 0700 for the block, after removing those of killed processes.

    `kind` is the parent directory: that of measured engines, or WORKERS. Raises AccessDenied.
    """
    parent = make_private(make_private(directories.runtime) / kind)
    with _lock_runtime(parent):
        for old in sorted(parent.iterdir()):
            _remove_stale(old)
        own = make_private(parent / secrets.token_hex(4))
        # A process that checks whether the directory is in use holds the lock for a moment.
        lock = _lock(own, _TIMEOUT_S)
        lock.acquire()
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        lock.release()


def is_in_use(directories: Directories) -> bool:
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
