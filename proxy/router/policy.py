"""The routing policies: which instance takes a request; and the weights of instances. Pure.

`proxy.router.candidates` makes the choice.

`affinity`, the default:

1. A conversation goes to its owner, if the owner's cache holds at least 64 of its tokens. It moves
   if the owner has no free slot, another instance has one, and waiting takes longer than the answer
   there: the prompt's time plus a quarter, plus the time to refill the owner's cache as far as no
   slot file holds it. It also waits no longer than that, so a wrong estimate costs at most twice
   the move. It leaves an owner with a free slot only for a faster instance, by the same rule.
2. A new conversation goes to an instance that owns less than 1.25 times its share plus one (without
   the extra one, the first few related conversations would be separated): first the one with most
   of the prompt in its cache, then the one that owns the fewest conversations, then the least busy.
   A faster instance gets it in spite of a smaller cache if it answers in less than 4/5 of the time.

Shares, loads and turns are relative to the instances' weights (`Weight`).

Instances on trial serve some conversations, the others serve the rest (`on_trial`), and each
conversation stays on its side. Only a request that finds no slot there goes to the other side.

`least-busy` takes the instance with the fewest requests per slot, `round-robin` the next in turn. A
spare instance (by default, one on another machine) takes only requests that find no free slot
elsewhere; a conversation that it owns stays there. No request goes to an instance without a free
slot.

Weights share requests between instances of unequal speed, in inverse proportion to the latency per
token, like the layers of `corral balance`. An instance with too few measurements gets an average
share, so that it is measured. Below a threshold all weights are equal, because two engines on one
machine rarely measure the same. Every share is large enough for its instance to be measured again;
measurements from long before the model's latest response do not count.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from proxy.upstream.upstream import MEMORY_S, DecodeLatency

_IMBALANCE_THRESHOLD: Final = 2.0
# The smallest weight, relative to the fastest instance's.
_SMALLEST: Final = 1 / 16

WeightReason = Literal["measured", "set", "equal"]


@dataclass(frozen=True, slots=True)
class Weight:
    """An instance's share of requests as a multiple of an average one."""

    value: float = 1.0
    # `measured`, `set` in the settings, or `equal`: too few measurements, or too little difference.
    reason: WeightReason = "equal"


EQUAL: Final = Weight()


# An instance's measured latency, and its weight in the settings, or None.
Speed = tuple[DecodeLatency, float | None]


def weights_of(speeds: Sequence[Speed]) -> list[Weight]:
    """Return the weights of one model's instances; measured weights average 1."""
    measured = iter(_measured_weights([latency for latency, weight in speeds if weight is None]))
    return [next(measured) if weight is None else Weight(weight, "set") for _, weight in speeds]


def _measured_weights(latencies: Sequence[DecodeLatency]) -> list[Weight]:
    speeds = _relative_speeds(latencies)
    known = [speed for speed in speeds if speed is not None]
    if not known or max(known) <= _IMBALANCE_THRESHOLD * min(known):
        return [EQUAL] * len(latencies)
    mean, least = sum(known) / len(known), _SMALLEST * max(known)
    return [
        EQUAL if speed is None else Weight(max(speed, least) / mean, "measured") for speed in speeds
    ]


def _relative_speeds(latencies: Sequence[DecodeLatency]) -> list[float | None]:
    """Return speeds as multiples of one instance's; None if it cannot be compared."""
    since_s = max((latency.latest_s for latency in latencies), default=0.0) - MEMORY_S
    base = max(
        latencies, key=lambda latency: (latency.latest_s >= since_s, latency.samples), default=None
    )
    ratios = [base and latency.over(base, since_s) for latency in latencies]
    return [1 / ratio if ratio else None for ratio in ratios]


# The most conversations of an instance, as a multiple of its share.
SHARE: Final = 1.25
# How much sooner another instance must answer.
SOONER: Final = 1.25
# Computing fewer tokens is as fast as finding them in a cache.
WORTH_TOKENS: Final = 64
