"""A process by its pid and creation time, because pids are reused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import psutil

# psutil derives creation times from clock ticks and the boot time, both exact to 10 ms.
_SAME_PROCESS_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    created_at: float  # seconds since the epoch, as psutil reports it

    def is_alive(self) -> bool:
        try:
            created_at = psutil.Process(self.pid).create_time()
        except psutil.Error:
            return False
        return abs(created_at - self.created_at) < _SAME_PROCESS_S


def identity_of(pid: int) -> ProcessIdentity:
    """Raises ProcessLookupError if there is no such process."""
    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(pid) from error
