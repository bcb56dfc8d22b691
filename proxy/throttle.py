"""Lets some events of one cause through each minute, and counts the rest.

A client that can cause a line in a log could fill it otherwise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final

WINDOW_S: Final = 60.0
# Causes told apart at one time; those beyond share one.
_CAUSES_MAX: Final = 64
_OTHERS: Final = "others"


class Throttle:
    """Admits a bounded number of events of each cause in each window.

    Args:
        burst: Events of one cause that a window admits, at least 1.
        rest: Told at the end of a window how many events of a cause were withheld.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        burst: int,
        rest: Callable[[Hashable, int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._rest = rest
        self._clock = clock
        self._windows: dict[Hashable, tuple[float, int]] = {}

    def admit(self, cause: Hashable) -> bool:
        """Return whether one more event of a cause is let through."""
        self.expire()
        if cause not in self._windows and len(self._windows) >= _CAUSES_MAX:
            cause = _OTHERS
        if cause not in self._windows:
            self._windows[cause] = (self._clock() + WINDOW_S, 0)
            _call_later(WINDOW_S, self.expire)
        until_s, count = self._windows[cause]
        self._windows[cause] = (until_s, count + 1)
        return count < self._burst

    def expire(self) -> None:
        """End the windows whose time is over, and tell what each withheld."""
        now_s = self._clock()
        for cause in [one for one, (until_s, _) in self._windows.items() if until_s <= now_s]:
            _, count = self._windows.pop(cause)
            if count > self._burst:
                self._rest(cause, count - self._burst)


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    """Call later where a loop runs; elsewhere the next event does."""
    try:
        asyncio.get_running_loop().call_later(delay_s, call)
    except RuntimeError:
        return
