"""Waiting for the exit of a process: by a pidfd, or on systems without them by looking.

Source: pidfd_open(2), Linux 5.3; macOS and BSD have none.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

import psutil

# Between two checks, on a system without pidfds.
_LOOK_EVERY_S: Final = 0.02


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    def is_alive(self) -> bool: ...


class ProcessEnd:
    """The exit of one process; a later process with its number is not mistaken for it."""

    def __init__(self, owner: Process | None, pidfd: int | None) -> None:
        self._owner = owner
        self._pidfd = pidfd

    def wait(self, limit_s: float) -> bool:
        """Return whether it exits within the limit."""
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return bool(poll.poll(limit_s * 1000))
        until_s = time.monotonic() + limit_s
        while self._owner and self._owner.is_alive():
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True


class ChildExit:
    """The exit of a child that this process has not reaped."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = _open_pidfd(pid)

    async def wait(self) -> None:
        """Return when the child has exited; it is to be reaped then."""
        if self._pidfd is not None:
            await readable(self._pidfd)
            return
        while _runs(self._pid):  # noqa: ASYNC110 (nothing tells of its exit)
            await asyncio.sleep(_LOOK_EVERY_S)

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)


@contextmanager
def held(pid: int) -> Iterator[Callable[[float], None] | None]:
    """Hold a process, so that a later one with its number is not mistaken for it.

    Yields:
        A function that kills the process and waits for its end, a limited number of seconds; None
        if the process has exited.
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
                process.kill()  # psutil compares the time of its creation
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


async def readable(fd: int) -> None:
    """Wait until a descriptor is readable; a pidfd is after the end of its process."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


@contextmanager
def process_end(owner: Process | None) -> Iterator[ProcessEnd]:
    """Yield the exit of a process, to wait for within the block."""
    pidfd = _open(owner)
    try:
        # Checked after opening the descriptor, which could be that of a later process.
        is_there = owner is not None and owner.is_alive()
        yield ProcessEnd(owner, pidfd) if is_there else ProcessEnd(None, None)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _open(owner: Process | None) -> int | None:
    if owner is not None and owner.is_alive():
        with suppress(OSError):
            return _open_pidfd(owner.pid)
    return None


def _open_pidfd(pid: int) -> int | None:
    """Return None on a system without pidfds; raises OSError if there is no such process."""
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
