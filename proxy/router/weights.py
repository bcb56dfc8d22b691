"""How the requests of a model are shared between instances of unequal speed. Pure.

Shares are in inverse proportion to the latency per token, as `corral balance` shares layers. An
instance that was not measured enough gets the share of an average one, so that it will be. Below a
threshold all are equal: two engines on one machine seldom measure the same. No share is so small
that its instance is not measured again; what was measured long before the model's latest response
does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from proxy.upstream.decode_latency import MEMORY_S, UNMEASURED, DecodeLatency

_IMBALANCE_THRESHOLD: Final = 2.0
# Of the fastest instance's weight.
_SMALLEST: Final = 1 / 16

WeightReason = Literal["measured", "set", "equal"]


@dataclass(frozen=True, slots=True)
class Weight:
    """An instance's share of requests as a multiple of an average one.

    Attributes:
        reason: `measured`, `set` in the settings, or `equal`: not measured enough, or little
            different from the others.
    """

    value: float = 1.0
    reason: WeightReason = "equal"


EQUAL: Final = Weight()


@dataclass(frozen=True, slots=True)
class Speed:
    """What is known of one instance; `weight` is that of the settings, or None."""

    latency: DecodeLatency = UNMEASURED
    weight: float | None = None


def weights_of(speeds: Sequence[Speed]) -> list[Weight]:
    """Return the weights of the instances of one model; those that are measured average 1."""
    measured = iter(_measured([one.latency for one in speeds if one.weight is None]))
    return [next(measured) if one.weight is None else Weight(one.weight, "set") for one in speeds]


def _measured(latencies: Sequence[DecodeLatency]) -> list[Weight]:
    speeds = _relative_speeds(latencies)
    known = [one for one in speeds if one is not None]
    if not known or max(known) <= _IMBALANCE_THRESHOLD * min(known):
        return [EQUAL] * len(latencies)
    mean, least = sum(known) / len(known), _SMALLEST * max(known)
    return [EQUAL if one is None else Weight(max(one, least) / mean, "measured") for one in speeds]


def _relative_speeds(latencies: Sequence[DecodeLatency]) -> list[float | None]:
    """Return multiples of one instance's speed; None where they cannot be compared."""
    since_s = max((one.latest_s for one in latencies), default=0.0) - MEMORY_S
    base = max(latencies, key=lambda one: (one.latest_s >= since_s, one.samples), default=None)
    ratios = [base and one.over(base, since_s) for one in latencies]
    return [1 / ratio if ratio else None for ratio in ratios]
