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
        """A process that has ended is not, even before its parent has waited for it."""
        try:
            found = psutil.Process(self.pid)
            has_ended = found.status() == psutil.STATUS_ZOMBIE
            return not has_ended and abs(found.create_time() - self.created_at) < _SAME_PROCESS_S
        except psutil.Error:
            return False


def identity_of(pid: int) -> ProcessIdentity:
    """Raises ProcessLookupError if there is no such process."""
    try:
        return ProcessIdentity(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(pid) from error
