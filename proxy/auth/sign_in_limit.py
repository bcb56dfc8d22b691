"""How many wrong tokens and keys an address may send: ten at once, then one every six seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from proxy.auth.rate_limit import next_full_at_s
from proxy.errors import TooManyRequests

_PER_MINUTE: Final = 10
_MINUTE_S: Final = 60.0
_ADDRESSES_MAX: Final = 1024


class SignInLimit:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_at_s: dict[str, float] = {}  # by address

    def check(self, address: str) -> None:
        """Raises TooManyRequests where it may not try again now."""
        now_s = self._clock()
        wait_s = self._next(address, now_s) - now_s - _MINUTE_S
        if wait_s > 1e-6:  # less is a rounding error
            retry_after_s = math.ceil(wait_s)
            raise TooManyRequests(
                f"too many wrong tokens or keys; retry in {retry_after_s} s", retry_after_s
            )

    def note_failure(self, address: str) -> None:
        now_s = self._clock()
        full_at_s = self._next(address, now_s)
        if len(self._full_at_s) >= _ADDRESSES_MAX:
            known = self._full_at_s.items()
            self._full_at_s = {one: at_s for one, at_s in known if at_s > now_s}
        if len(self._full_at_s) < _ADDRESSES_MAX or address in self._full_at_s:
            self._full_at_s[address] = full_at_s

    def _next(self, address: str, now_s: float) -> float:
        return next_full_at_s(self._full_at_s.get(address, -math.inf), _PER_MINUTE, now_s)
