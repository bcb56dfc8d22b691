"""The instances of one model as sets, so that a choice among a thousand looks at a few.

A set is a number with a bit for each instance. The sets are kept up to date: an instance that
changed since the last choice moves from one to another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from proxy.router.instances import Instance
from proxy.router.weights import Weight

# So few are looked at one by one; of more, an order tells the first.
_FEW: Final = 16

# An instance in an order, by what it is ordered by and by its admission.
_Place = tuple[float, int, Instance]


class InstanceSets:
    """Instances by what choices depend on.

    Args:
        instances: In the order of their admission.
        weights: By name.

    Attributes:
        all: All of them.
        free: Those with a free slot.
        spare: Those that take only requests that find no free slot elsewhere.
        local: Those of this machine.
        on_trial: Those that run the profile on trial.
        by_weight: Those of each weight.
    """

    def __init__(self, instances: Sequence[Instance], weights: Mapping[str, Weight]) -> None:
        self.instances = instances
        self._by_bit = {one.bit: one for one in instances}
        self._by_name = {one.upstream.name: one for one in instances}
        self._numbers = {one: number for number, one in enumerate(instances)}
        self.all = sum(self._by_bit)
        self.spare = sum(one.bit for one in instances if one.is_spare)
        self.local = sum(one.bit for one in instances if one.upstream.node is None)
        self.on_trial = sum(one.bit for one in instances if one.upstream.is_on_trial)
        self.free = 0
        self._by_use: dict[tuple[int, int], int] = {}
        self._states: dict[Instance, tuple[int, float, float]] = {}
        self._turns: list[_Place] = []
        self._rates: list[_Place] = []
        self.set_weights(weights)
        self.update(instances)

    def set_weights(self, weights: Mapping[str, Weight]) -> None:
        self.weights = weights
        self.by_weight: dict[float, int] = {}
        for name, one in self._by_name.items():
            weight = weights[name].value
            self.by_weight[weight] = self.by_weight.get(weight, 0) | one.bit

    def update(self, changed: Iterable[Instance]) -> None:
        """Take what instances have become."""
        for one in changed:
            if one in self._numbers:
                self._update(one)

    # One instance.

    def weight(self, instance: Instance) -> float:
        return self.weights[instance.upstream.name].value

    def get(self, name: str | None) -> Instance | None:
        return self._by_name.get(name) if name else None

    def named(self, names: Iterable[str]) -> int:
        """Return the set of those that have one of some names."""
        found = filter(None, map(self.get, names))
        return sum({one.bit for one in found})

    # Some of them.

    def peers(self, some: int) -> int:
        """Return all that are spare, and on trial, as these are."""
        spare = self.spare if some & self.spare else ~self.spare
        return self.all & spare & (self.on_trial if some & self.on_trial else ~self.on_trial)

    def free_slots(self, some: int) -> int:
        return sum(
            (slots - in_use) * (some & members).bit_count()
            for (in_use, slots), members in self._by_use.items()
        )

    def slots(self, some: int) -> int:
        return sum(
            slots * (some & members).bit_count() for (_, slots), members in self._by_use.items()
        )

    def least_loaded(self, some: int) -> int:
        """Return those with the smallest share of their slots in use, by their weights."""
        return least(
            (in_use / slots / weight, found)
            for (in_use, slots), members in self._by_use.items()
            if some & members
            for weight, weighted in self.by_weight.items()
            if (found := some & members & weighted)
        )

    def first_turn(self, some: int) -> Instance:
        """Return the one that is next in turn."""
        if some.bit_count() > _FEW:
            return next(one for _, _, one in self._turns if one.bit & some)
        return min(self.members(some), key=lambda one: (one.turn, self._numbers[one]))

    def by_prefill_rate(self, some: int) -> Iterator[Instance]:
        """Yield those that compute prompts faster first."""
        if some.bit_count() > _FEW:
            return (one for _, _, one in self._rates if one.bit & some)
        return iter(sorted(self.members(some), key=lambda one: -one.rates.prefill_tps))

    def members(self, some: int) -> Iterator[Instance]:
        while some:
            bit = some & -some
            some ^= bit
            yield self._by_bit[bit]

    def number(self, instance: Instance) -> int:
        """Return its place in the order of admission."""
        return self._numbers[instance]

    def _update(self, one: Instance) -> None:
        now = (len(one.leases), one.turn, -one.rates.prefill_tps)
        before, number, slots = self._states.get(one), self._numbers[one], one.upstream.slots
        self._states[one] = now
        if before is None or before[0] != now[0]:
            if before is not None:
                self._by_use[before[0], slots] &= ~one.bit
            self._by_use[now[0], slots] = self._by_use.get((now[0], slots), 0) | one.bit
            self.free = self.free | one.bit if now[0] < slots else self.free & ~one.bit
        for order, place in ((self._turns, 1), (self._rates, 2)):
            if before is None or before[place] != now[place]:
                if before is not None:
                    del order[bisect_left(order, (before[place], number))]
                insort(order, (now[place], number, one))


def least(found: Iterable[tuple[float, int]]) -> int:
    """Return the sets with the least value, together."""
    smallest, union = float("inf"), 0
    for value, some in found:
        if value < smallest:
            smallest, union = value, some
        elif value == smallest:
            union |= some
    return union
