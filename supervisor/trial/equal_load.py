"""Picks requests of both sides that ran under equal load. Pure.

The side with the larger share decodes more requests at once, which makes each slower, whatever its
profile. So only as many requests with none, one, two … others beside them are compared as make both
sides have the same proportions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

# A value, and how many other requests its engine had at that time.
Value = tuple[float, int]
Conversations = Sequence[Sequence[Value]]
Picked = list[list[float]]


def under_equal_load(base: Conversations, trial: Conversations) -> tuple[Picked, Picked]:
    counts = [Counter(others for one in side for _, others in one) for side in (base, trial)]
    shares = _common_shares(*counts)
    picked = [
        _thinned(side, {others: share * found.total() for others, share in shares.items()}, found)
        for side, found in zip((base, trial), counts, strict=True)
    ]
    return picked[0], picked[1]


def count(conversations: Sequence[Sequence[object]]) -> int:
    return sum(map(len, conversations))


def _common_shares(base: Counter[int], trial: Counter[int]) -> dict[int, float]:
    """Return the share of requests under each load that both sides have at least."""
    return {
        others: min(base[others] / base.total(), trial[others] / trial.total())
        for others in sorted(base.keys() & trial.keys())
    }


def _thinned(
    conversations: Conversations, quotas: Mapping[int, float], counts: Counter[int]
) -> Picked:
    """Keep about as many values under each load as its quota, spread over all of them."""
    seen: Counter[int] = Counter()

    def kept(values: Sequence[Value]) -> Iterator[float]:
        for value, others in values:
            kept_share = quotas.get(others, 0.0) / counts[others]
            before = seen[others]
            seen[others] += 1
            if _whole(seen[others] * kept_share) > _whole(before * kept_share):
                yield value

    return [found for one in conversations if (found := list(kept(one)))]


def _whole(number: float) -> int:
    """Round down, but not for an error in the last digit."""
    return math.floor(number + 1e-9)
