"""How estimates turned out lately, by how much was to do: what no model of an engine knows. Pure.

Requests that come later take slots that go first, and programs take processor time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median
from typing import Final

_LATEST_MAX: Final = 32
_MIN: Final = 8
_LEVELS: Final = 5
# A correction goes half the way, and no further: the pace follows a machine that became slower.
_FACTOR_MAX: Final = 1.4


class Correction:
    """Of one model."""

    def __init__(self) -> None:
        self._ratios: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_LATEST_MAX)
        )

    def note(self, others: int, estimated_s: float, real_s: float) -> None:
        """Take what an uncorrected estimate turned out to be, beside so many other requests."""
        if estimated_s > 0:
            self._ratios[_level(others)].append(real_s / estimated_s)

    def factor(self, others: int) -> float:
        """Return what to multiply an estimate with."""
        ratios = self._ratios.get(_level(others), ())
        if len(ratios) < _MIN:
            return 1.0
        return min(_FACTOR_MAX, max(1 / _FACTOR_MAX, math.sqrt(median(ratios))))


def _level(others: int) -> int:
    """0 alone, 1, 2 to 3, 4 to 7, more."""
    return min(others.bit_length(), _LEVELS - 1)
