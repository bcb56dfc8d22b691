"""Compares the next-token distributions of two runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

# An engine reports the most probable tokens; the others count as one.
_EPSILON: Final = 1e-6


def kl_divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the Kullback-Leibler divergence of `other` from `reference`, in nats.

    Args:
        reference: Log-probabilities of the most probable tokens.
        other: The same. A token that it lacks is at most as probable as its least probable one.
    """
    lowest = min(other.values(), default=math.log(_EPSILON))
    known = [(p, other.get(token, lowest)) for token, p in reference.items()]
    total = math.fsum(math.exp(p) * (p - q) for p, q in known)
    rest, other_rest = (
        max(_EPSILON, 1 - math.fsum(math.exp(p) for p in logs))
        for logs in ([p for p, _ in known], [q for _, q in known])
    )
    return max(0.0, total + rest * math.log(rest / other_rest))
