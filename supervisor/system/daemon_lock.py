"""Locks the runtime directory for one daemon, and waits for processes to exit.

The state file beside the lock names the daemon. A daemon that is killed loses its lock, but leaves
its state file behind.

The exit of a process is seen through a pidfd, or by polling on systems without pidfds. Source:
pidfd_open(2), Linux 5.3; macOS and BSD have none.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import filelock
import psutil

from supervisor.errors import AccessDenied, DaemonBusy
from supervisor.system.files import write_atomic
from supervisor.system.paths import Directories, make_private

# psutil derives creation times from clock ticks and the boot time, both exact to 10 ms.
_SAME_PROCESS_S: Final = 0.05
# Between two checks, on a system without pidfds.
_POLL_INTERVAL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    created_at: float  # seconds since the epoch, as psutil reports it

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie does not."""
        with suppress(psutil.Error):
            return self._is_there() and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def _is_there(self) -> bool:
        """Return whether the process was not reaped.

        It is a zombie as soon as its main thread has ended, but its parent cannot reap it, and its
        pidfd does not tell that it ended, before its other threads have ended too.
        """
        with suppress(psutil.Error):
            return abs(psutil.Process(self.pid).create_time() - self.created_at) < _SAME_PROCESS_S
        return False

    def wait(self, limit_s: float) -> bool:
        """Return whether the process, which is not our child, exits within the limit."""
        pidfd, until_s = None, time.monotonic() + limit_s
        with suppress(OSError):
            pidfd = _open_pidfd(self.pid)
        try:
            # Only now, because the descriptor could belong to a later process.
            if pidfd is not None and self._is_there():
                return bool(select.select([pidfd], [], [], limit_s)[0])
            while self.is_alive():
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return False
                time.sleep(min(left_s, _POLL_INTERVAL_S))
            return True
        finally:
            if pidfd is not None:
                os.close(pidfd)


def identity_of(pid: int) -> ProcessIdentity:
    """Identify a process; raises ProcessLookupError if there is none."""
    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(pid) from error


class ChildExit:
    """The exit of a child that this process has not reaped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = _open_pidfd(pid)

    async def wait(self) -> None:
        """Return when the child has exited; the caller must then reap it."""
        if self._pidfd is not None:
            await wait_readable(self._pidfd)
            return
        while _runs(self._pid):  # noqa: ASYNC110 (no event announces its exit)
            await asyncio.sleep(_POLL_INTERVAL_S)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


@contextmanager
def hold_process(pid: int) -> Iterator[Callable[[float], None] | None]:
    """Hold a process, so that a later process with the same pid is not mistaken for it.

    Yields a function that kills it and waits at most the given seconds; None if it has exited.
    """
    try:
        process = psutil.Process(pid)
        pidfd = _open_pidfd(pid)
    except (psutil.Error, OSError):
        yield None
        return

    def kill(limit_s: float) -> None:
        if pidfd is None:
            with suppress(psutil.Error):
                process.kill()  # psutil checks the creation time
                process.wait(limit_s)
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [], limit_s)

    try:
        yield kill
    finally:
        if pidfd is not None:
            os.close(pidfd)


async def wait_readable(fd: int) -> None:
    """Wait until a descriptor is readable; a pidfd becomes readable when its process exits."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


def _open_pidfd(pid: int) -> int | None:
    """Return None on a system without pidfds; raises OSError if there is no such process."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass(frozen=True, slots=True)
class DaemonInfo(ProcessIdentity):
    """The daemon that owns a runtime directory."""

    version: str
    url: str  # of its proxy
    api_key_file: str | None = None  # None unless it is a desktop backend


def this_daemon(version: str, url: str, api_key_file: Path | None = None) -> DaemonInfo:
    ours = identity_of(os.getpid())
    key_file = str(api_key_file) if api_key_file else None
    return DaemonInfo(ours.pid, ours.created_at, version, url, key_file)


@contextmanager
def lock_runtime_dir(directories: Directories) -> Iterator[None]:
    """Hold the directory's lock. Raises AccessDenied, DaemonBusy: another daemon holds it."""
    make_private(directories.runtime)
    lock = filelock.FileLock(directories.lock_file, timeout=0, mode=0o600)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        owner = read_owner(directories.state_file)
        identity = f" (pid {owner.pid}, {owner.url})" if owner else ""
        raise DaemonBusy(
            f"a daemon already runs in {directories.runtime}{identity}",
            hint="corral status shows it, corral stop ends it",
        ) from error
    except OSError as error:
        raise AccessDenied(f"cannot lock {directories.lock_file}: {error.strerror}") from error
    try:
        yield
    finally:
        directories.state_file.unlink(missing_ok=True)
        lock.release()


def write_owner(path: Path, owner: DaemonInfo) -> None:
    write_atomic(path, json.dumps(asdict(owner)), durable=False)


def read_owner(path: Path) -> DaemonInfo | None:
    """Read the state file; None if it is missing or invalid."""
    try:
        return DaemonInfo(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
