"""Pauses after failures, twice as long each time until something succeeds again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

_FIRST_S: Final = 60.0
_LAST_S: Final = 3600.0


class Pause:
    """A disk that fails is tried again, and reported, once for each pause."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = float("-inf")
        self._length_s = 0.0

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until_s

    def begin(self) -> float | None:
        """Begin a pause; return its seconds, None during one."""
        if self.is_on:
            return None
        self._length_s = min(_LAST_S, max(_FIRST_S, 2 * self._length_s))
        self._until_s = self._clock() + self._length_s
        return self._length_s

    def end(self) -> None:
        """Note a success: the next pause is a short one."""
        self._length_s = 0.0
