"""Divides whole layers in proportion to weights, by largest remainders. Pure.

Source: Balinski and Young, Fair Representation, on Hamilton's method.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """What one of them should have, as a fraction of layers, and what it may have."""

    quota: float
    least: int
    most: int

    @property
    def whole(self) -> int:
        return min(self.most, max(self.least, int(self.quota)))


def apportion(total: int, shares: Sequence[Share]) -> tuple[int, ...]:
    """Divide exactly `total`; of equal remainders, the first in order gets the layer.

    Raises:
        ValueError: The limits do not allow this total.
    """
    if not sum(one.least for one in shares) <= total <= sum(one.most for one in shares):
        raise ValueError(f"{total} cannot be divided within these limits")
    given = [one.whole for one in shares]
    while (missing := total - sum(given)) != 0:
        step = 1 if missing > 0 else -1
        at = max(_movable(given, shares, step), key=lambda i: step * (shares[i].quota - given[i]))
        given[at] += step
    return tuple(given)


def _movable(given: Sequence[int], shares: Sequence[Share], step: int) -> Iterator[int]:
    for at, (count, share) in enumerate(zip(given, shares, strict=True)):
        if share.least <= count + step <= share.most:
            yield at
