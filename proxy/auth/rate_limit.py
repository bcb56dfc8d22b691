"""Limits of a key: concurrent requests, and requests per minute.

A token bucket: `requests_per_minute` at once, then one more every 60 s / requests_per_minute.
State is kept for each key that was ever used; keys come from a file, so they are few.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from proxy.auth.keys_file import Key
from proxy.errors import TooManyRequests

_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class _Usage:
    """`full_at_s` is when the bucket is full again; it is the bucket's whole state."""

    in_flight: int = 0
    full_at_s: float = -math.inf


class RateLimiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def holding(self, key: Key) -> Iterator[None]:
        """Count a request, in flight for the length of the block. Raises TooManyRequests."""
        usage = self._usage.setdefault(key.name, _Usage())
        _take(usage, key, self._clock())
        try:
            yield
        finally:
            usage.in_flight -= 1


def next_full_at_s(full_at_s: float, per_minute: int, now_s: float) -> float:
    """When the bucket will be full again after one more request.

    The request must wait until the returned time is at most a minute ahead.
    """
    return max(full_at_s, now_s) + _MINUTE_S / per_minute


def _take(usage: _Usage, key: Key, now_s: float) -> None:
    """Count a request against both limits, or against neither."""
    if key.max_in_flight is not None and usage.in_flight >= key.max_in_flight:
        raise TooManyRequests(
            f"API key {key.name!r} has {usage.in_flight} requests in flight, its limit "
            "(max_in_flight); wait until one ends"
        )
    if key.requests_per_minute is not None:
        full_at_s = next_full_at_s(usage.full_at_s, key.requests_per_minute, now_s)
        wait_s = full_at_s - now_s - _MINUTE_S
        if wait_s > 1e-6:  # less is a rounding error
            raise TooManyRequests(
                f"API key {key.name!r} is limited to {key.requests_per_minute} requests a minute "
                f"(requests_per_minute); retry in {math.ceil(wait_s)} s",
                math.ceil(wait_s),
            )
        usage.full_at_s = full_at_s
    usage.in_flight += 1
