"""Limits of a key: concurrent requests, and requests per minute.

A token bucket: `requests_per_minute` at once, then one more every 60 s / requests_per_minute.
State is kept for each key that was ever used; keys come from a file, so they are few.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from proxy.auth.keys_file import Key
from proxy.errors import KeyLimited

_MINUTE_S: Final = 60.0


@dataclass(slots=True)
class _Usage:
    """Of one key.

    Attributes:
        full_at_s: When the bucket is full again; it is the bucket's whole state.
        has_ended: Set when a request ends; None while nobody waits for that.
    """

    in_flight: int = 0
    full_at_s: float = -math.inf
    has_ended: asyncio.Event | None = None


class RateLimiter:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def holding(self, key: Key, *, requests: int = 1, in_flight: int = 1) -> Iterator[None]:
        """Count requests of a minute, and those in flight for the length of the block.

        Each is 0 or 1. Raises KeyLimited.
        """
        usage = self._usage.setdefault(key.name, _Usage())
        _take(usage, key, self._clock(), requests)
        usage.in_flight += in_flight
        try:
            yield
        finally:
            usage.in_flight -= in_flight
            if usage.has_ended:
                usage.has_ended.set()
                usage.has_ended = None

    async def wait(self, key: Key, limit_s: float) -> None:
        """Wait until a request of a key ends."""
        usage = self._usage.setdefault(key.name, _Usage())
        usage.has_ended = usage.has_ended or asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await usage.has_ended.wait()


def next_full_at_s(full_at_s: float, per_minute: int, now_s: float) -> float:
    """When the bucket will be full again after one more request.

    The request must wait until the returned time is at most a minute ahead.
    """
    return max(full_at_s, now_s) + _MINUTE_S / per_minute


def _take(usage: _Usage, key: Key, now_s: float, requests: int) -> None:
    """Check both limits, and count requests of a minute if neither is exceeded."""
    if key.max_in_flight is not None and usage.in_flight >= key.max_in_flight:
        raise KeyLimited(
            f"API key {key.name!r} has {usage.in_flight} requests in flight, its limit "
            "(max_in_flight); wait until one ends"
        )
    if key.requests_per_minute is not None and requests:
        full_at_s = next_full_at_s(usage.full_at_s, key.requests_per_minute, now_s)
        wait_s = full_at_s - now_s - _MINUTE_S
        if wait_s > 1e-6:  # less is a rounding error
            raise KeyLimited(
                f"API key {key.name!r} is limited to {key.requests_per_minute} requests a minute "
                f"(requests_per_minute); retry in {math.ceil(wait_s)} s",
                math.ceil(wait_s),
            )
        usage.full_at_s = full_at_s
