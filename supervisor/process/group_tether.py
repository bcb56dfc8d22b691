"""Kills a whole process group when this process ends, however it ends.

The parent-death signal reaches a child alone, not what the child has started. Here the kernel sends
SIGKILL to the group when the last writer of a pipe is gone, which is this process: it does so as
long as one process of the group has not closed the reader that it inherits.

Source: fcntl(2), F_SETOWN with a process group, F_SETSIG and O_ASYNC; Linux, fs/pipe.c
(pipe_release).
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import suppress


class GroupTether:
    """A pipe that a child inherits as `reader`; `close` kills what is left of its group."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def attach(self) -> None:  # pragma: no cover (runs between fork and exec)
        """Call it in the child, which leads its group."""
        with suppress(OSError, AttributeError):  # a sandbox, or a system, without such signals
            fcntl.fcntl(self.reader, fcntl.F_SETOWN, -os.getpid())
            fcntl.fcntl(self.reader, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.reader, fcntl.F_SETFL, os.O_ASYNC)

    def spawned(self) -> None:
        """Leave the reader to the child."""
        os.close(self.reader)

    def close(self) -> None:
        os.close(self._writer)
