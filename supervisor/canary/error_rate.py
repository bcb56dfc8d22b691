"""Compares how often two engines fail. Pure.

Source: Newcombe, "Interval estimation for the difference between independent proportions", 1998,
method 10: intervals of Wilson's score, combined. It holds for few requests and for no errors.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Final

# As of every difference that is claimed: people look often.
_LEVEL: Final = 0.99
_Z: Final = NormalDist().inv_cdf((1 + _LEVEL) / 2)


def least_increase(base: tuple[int, int], other: tuple[int, int]) -> float:
    """Return the lower end of the interval of 99 % of how much higher another rate is.

    Each is a number of errors and of requests. Below 0 where it may as well be lower; -1 without
    requests on one side.
    """
    if not (base[1] and other[1]):
        return -1.0
    own, tried = base[0] / base[1], other[0] / other[1]
    (_, own_high), (tried_low, _) = _wilson(*base), _wilson(*other)
    return tried - own - math.hypot(tried - tried_low, own_high - own)


def _wilson(errors: int, requests: int) -> tuple[float, float]:
    rate, spread = errors / requests, _Z**2 / requests
    middle = rate + spread / 2
    half = math.sqrt(spread * (rate * (1 - rate) + spread / 4))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)
