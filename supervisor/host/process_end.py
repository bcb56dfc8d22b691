"""Waiting for the exit of a process that is not a child."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

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
    if owner is None or not owner.is_alive() or not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(owner.pid)
    return None
