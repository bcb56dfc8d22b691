"""Waits for the end of a process that is not our child."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from supervisor.host.lock import DaemonInfo

# Where the system has no descriptors of processes, how often to look.
_LOOK_EVERY_S: Final = 0.02


class ProcessEnd:
    """The end of one process, which no later process with its number is taken for.

    Args:
        owner: The process; None for one that has ended already.
        pidfd: A descriptor of it, or None where the system has none.
    """

    def __init__(self, owner: DaemonInfo | None, pidfd: int | None) -> None:
        self._owner = owner
        self._pidfd = pidfd

    def wait(self, limit_s: float) -> bool:
        """Wait; return whether it has ended within the limit, in seconds."""
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
def process_end(owner: DaemonInfo | None) -> Iterator[ProcessEnd]:
    """Yield the end of a process, to be waited for within the block.

    Source: pidfd_open(2): the descriptor is readable once the process has ended.
    """
    pidfd = _open(owner)
    try:
        # Looked at after the descriptor is there: else that could be of a later process.
        is_there = owner is not None and owner.is_alive()
        yield ProcessEnd(owner, pidfd) if is_there else ProcessEnd(None, None)
    finally:
        if pidfd is not None:
            os.close(pidfd)


def _open(owner: DaemonInfo | None) -> int | None:
    if owner is None or not owner.is_alive() or not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(owner.pid)
    return None
