"""How long the requests of a model hold their slots: running averages. Pure."""

from __future__ import annotations

import math
from typing import Final

from proxy.upstream.timings import Timings, average

# How long a request holds a slot, before any has finished.
_HELD_S: Final = 2.0
_RETRY_MAX_S: Final = 120


class LeaseTimes:
    """Averages over finished requests.

    Attributes:
        held_s: From the lease of a slot to the end of the response.
        decode_s: Of this, from the first to the last token.
    """

    def __init__(self) -> None:
        self.held_s = _HELD_S
        self.decode_s = 0.0

    def note(self, held_s: float, timings: Timings | None) -> None:
        self.held_s = average(self.held_s, held_s)
        if timings:
            self.decode_s = average(self.decode_s, timings.decode_ms / 1000)

    def wait_s(self, waiting: int, slots: int) -> float:
        """Return how long a request would wait behind so many for one of so many slots."""
        return self.held_s * (waiting + 1) / max(1, slots)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds after which a retry is worthwhile, 1 to 120."""
    return min(max(1, math.ceil(wait_s)), _RETRY_MAX_S)
