"""The time between two moments, without the time in which a busy machine gave no processor.

Linux counts how long a runnable thread waited for a processor. Source: proc(5),
/proc/PID/schedstat, second figure.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path


def _waited_s(pid: int | str) -> float:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
    return 0.0


def _children(pid: int) -> list[str]:
    """Return the child processes: a daemon's engines."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
    return []


class Gap:
    """One gap, measured since it was constructed or restarted.

    With `engines`, the wait of the engine that waited longest counts too.
    """

    def __init__(self, pid: int, *, engines: bool = False) -> None:
        self._pid = pid
        self._has_engines = engines
        self.restart()

    def restart(self) -> None:
        self.began_s = time.monotonic()
        self._own_s = self._ours_s()
        self._engines = self._engines_s()

    def _ours_s(self) -> float:
        return _waited_s(self._pid) + _waited_s("self")

    def _engines_s(self) -> dict[str, float]:
        return {pid: _waited_s(pid) for pid in _children(self._pid)} if self._has_engines else {}

    def lengths_s(self) -> tuple[float, float]:
        wall_s = time.monotonic() - self.began_s
        engines = self._engines_s()
        waits = (engines[pid] - before for pid, before in self._engines.items() if pid in engines)
        starved_s = self._ours_s() - self._own_s + max(waits, default=0)
        return wall_s, wall_s - min(wall_s, starved_s)
