"""The time between two moments, less what a busy machine is to blame for.

Time in which the machine gave the daemon, its engine or this process no processor is not counted as
theirs: Linux says how long a thread that could run waited for one. Source: proc(5),
/proc/PID/schedstat, its second figure.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def _waited_s(pid: int | str) -> float:
    """Return how long the first thread of a process has waited for a processor so far."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
    return 0.0


def _children(pid: int) -> list[str]:
    """Return the processes that a process started: a daemon's engines."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    return []


class Gap:
    """One gap, measured since it was made or begun again.

    Args:
        pid: The daemon.
        engines: Whether an engine has a part in it; the one that waited longest counts.
    """

    def __init__(self, pid: int, *, engines: bool = False) -> None:
        self._pid = pid
        self._has_engines = engines
        self.restart()

    def restart(self) -> None:
        """Measure from now on."""
        self.began_s = time.monotonic()
        self._own_s = self._ours_s()
        self._engines = self._engines_s()

    def _ours_s(self) -> float:
        return _waited_s(self._pid) + _waited_s("self")

    def _engines_s(self) -> dict[str, float]:
        return {pid: _waited_s(pid) for pid in _children(self._pid)} if self._has_engines else {}

    def lengths_s(self) -> tuple[float, float]:
        """Return the time on the wall, and what of it is not the machine's fault."""
        wall_s = time.monotonic() - self.began_s
        engines = self._engines_s()
        waits = (engines[pid] - before for pid, before in self._engines.items() if pid in engines)
        starved_s = self._ours_s() - self._own_s + max(waits, default=0)
        return wall_s, wall_s - min(wall_s, starved_s)
