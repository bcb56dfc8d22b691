"""Limits events per cause and minute, so that no client can fill the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final

WINDOW_S: Final = 60.0
# Further causes share one window.
_CAUSES_MAX: Final = 64
_OTHERS: Final = "others"


class Throttle:
    """Admits `burst` events per cause and window.

    `rest` is called at the end of a window with the number of events that were not admitted.
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
        """End the windows that are over."""
        now_s = self._clock()
        for cause in [one for one, (until_s, _) in self._windows.items() if until_s <= now_s]:
            _, count = self._windows.pop(cause)
            if count > self._burst:
                self._rest(cause, count - self._burst)


def _call_later(delay_s: float, call: Callable[[], None]) -> None:
    # Without an event loop, the next event ends the window.
    try:
        asyncio.get_running_loop().call_later(delay_s, call)
    except RuntimeError:
        return
