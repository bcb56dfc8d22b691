"""Quantiles of Student's t distribution."""

from __future__ import annotations

import functools
import math
from typing import Final

_BISECTIONS: Final = 80
_HIGHEST: Final = 1e6


@functools.cache
def t_quantile(level: float, degrees: int) -> float:
    """Return t of which |T| ≤ t has the probability `level`; degrees of freedom are at least 1."""
    low, high = 0.0, _HIGHEST
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _probability_within(middle, degrees) < level:
            low = middle
        else:
            high = middle
    return high


def _probability_within(t: float, degrees: int) -> float:
    """Return P(|T| ≤ t). Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(degrees))
    is_odd = degrees % 2
    cosine, term, total = math.cos(angle), 1.0, 0.0
    for k in range(1, (degrees - is_odd) // 2 + 1):
        total += term
        term *= cosine**2 * (2 * k - 1 + is_odd) / (2 * k + is_odd)
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * cosine * total)
    return math.sin(angle) * total
