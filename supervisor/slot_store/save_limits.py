"""Limits of what is written while engines serve: bytes per hour, and pauses after a failure.

Flash memory wears with each byte written.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Final

from supervisor.slot_store.pause import Pause

_HOUR_S: Final = 3600.0
_HOUR_MIN: Final = 60
# A disk that is slower than this stores 2 000 tokens of an 8B model in more than 20 s.
_RATE_MIN_BYTES: Final = 8 * 1024**2
# The time for smaller files says nothing of the rate.
_MEASURED_MIN_BYTES: Final = 4 * 1024**2
# Of the latest file, in the average.
_LATEST: Final = 0.3


class SaveLimits:
    """What may be written now.

    Attributes:
        pause: After a failure.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent_bytes = 0.0  # of an hour's, as of `_spent_at_s`
        self._spent_at_s = clock()
        self._written: defaultdict[int, float] = defaultdict(float)  # by minute
        self.pause = Pause(clock)
        self._rate_bytes: float | None = None  # per second

    @property
    def written_bytes(self) -> float:
        """Bytes written in the last hour, to the minute."""
        first = self._minute - _HOUR_MIN
        return sum(size_bytes for minute, size_bytes in self._written.items() if minute > first)

    @property
    def _minute(self) -> int:
        return int(self._clock() // 60)

    def may_write(self, size_bytes: float, hour_bytes: float) -> bool:
        """Return whether so much may be written, of `hour_bytes` in an hour."""
        return not self.pause.is_on and self._spent(hour_bytes) + size_bytes <= hour_bytes

    def note_written(self, size_bytes: float, hour_bytes: float) -> None:
        """Note what an engine wrote, also what it had to although the hour's bytes are spent."""
        self._written[self._minute] += size_bytes
        while len(self._written) > _HOUR_MIN:
            del self._written[min(self._written)]
        spent_bytes = self._spent(hour_bytes) + size_bytes
        self._spent_bytes, self._spent_at_s = min(spent_bytes, 2 * hour_bytes), self._clock()

    def note_stored(self, size_bytes: float, duration_s: float) -> str:
        """Note how long a disk took; return why it is too slow, as a clause, or nothing."""
        if size_bytes < _MEASURED_MIN_BYTES:
            self.pause.end()
            return ""
        rate_bytes = size_bytes / max(duration_s, 1e-6)
        before_bytes = rate_bytes if self._rate_bytes is None else self._rate_bytes
        self._rate_bytes = (1 - _LATEST) * before_bytes + _LATEST * rate_bytes
        if self._rate_bytes < _RATE_MIN_BYTES:
            rate_mib, self._rate_bytes = self._rate_bytes / 1024**2, None
            return f"the disk stores {rate_mib:.1f} MiB a second"
        self.pause.end()
        return ""

    def _spent(self, hour_bytes: float) -> float:
        passed_s = self._clock() - self._spent_at_s
        return max(0.0, self._spent_bytes - hour_bytes * passed_s / _HOUR_S)
