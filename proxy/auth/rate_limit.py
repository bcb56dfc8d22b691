"""How much a key may ask: requests at once, and requests a minute.

A minute's worth may come at once; then there is one more each 60 s / requests_per_minute. What is
kept is a few words for each key that was ever used, and keys come from a file.
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
# When one of a key's own requests ends is not known; its clients may well ask again soon.
_TRY_AGAIN_S: Final = 1


@dataclass(slots=True)
class _Usage:
    """What one key has used.

    `full_at_s` says it all of the requests a minute: when all that may come at once may come again.
    """

    in_flight: int = 0
    full_at_s: float = -math.inf


class RateLimiter:
    """Counts what each key uses.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _Usage] = {}

    @contextmanager
    def holding(self, key: Key) -> Iterator[None]:
        """Count a request of a key for the length of the block.

        Raises:
            TooManyRequests: The key has as many under way as it may, or has sent too many.
        """
        usage = self._usage.setdefault(key.name, _Usage())
        _take(usage, key, self._clock())
        try:
            yield
        finally:
            usage.in_flight -= 1


def next_full_at_s(full_at_s: float, per_minute: int, now_s: float) -> float:
    """Return when the bucket of a key is full again once one more request has come.

    Each request puts that off by 60 s / per_minute. The bucket is empty where it lies more than a
    minute ahead: then one more may come when what is returned lies a minute ahead.
    """
    return max(full_at_s, now_s) + _MINUTE_S / per_minute


def _take(usage: _Usage, key: Key, now_s: float) -> None:
    """Take a place for one request, or nothing at all."""
    if key.max_in_flight is not None and usage.in_flight >= key.max_in_flight:
        raise TooManyRequests(
            f"the API key {key.name!r} has {usage.in_flight} requests under way, "
            "which is as many as it may (max_in_flight); let one end first",
            _TRY_AGAIN_S,
        )
    if key.requests_per_minute is not None:
        full_at_s = next_full_at_s(usage.full_at_s, key.requests_per_minute, now_s)
        wait_s = full_at_s - now_s - _MINUTE_S
        # What rounding leaves is not worth a second.
        if wait_s > 1e-6:
            raise TooManyRequests(
                f"the API key {key.name!r} may send {key.requests_per_minute} requests a minute "
                f"(requests_per_minute); the next in {math.ceil(wait_s)} s",
                math.ceil(wait_s),
            )
        usage.full_at_s = full_at_s
    usage.in_flight += 1
