"""All instances that are in service or still hold requests: by name, by model, and as sets.

A set is a number with a bit for each instance, so that a choice among a thousand instances looks at
few of them. Sets are updated incrementally: only instances that changed since the last choice move.

Weights share requests between instances of unequal speed, in inverse proportion to the latency per
token, like the layers of `corral balance`. An instance with too few measurements gets an average
share, so that it is measured. Below a threshold all weights are equal, because two engines on one
machine rarely measure the same. Every share is large enough for its instance to be measured again;
measurements from long before the model's latest response do not count.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from proxy.common.background_tasks import persist
from proxy.router.lease import EQUAL, Clock, RoutingTarget, Speed, Weight
from proxy.upstream.upstream import MEMORY_S, UNMEASURED, DecodeLatency, Rates, Upstream

# Up to this number, instances are compared one by one; above, a sorted list is used.

# An instance in a sorted list: its key, its number in the order of admission, itself.
_Place = tuple[float, int, RoutingTarget]


class InstanceSets:
    """Sets of instances by the properties on which choices depend.

    Args:
        instances: Instances in the order of their admission.
        weights: Their weights, by name.
        few: Up to this number, instances are compared one by one, without a kept order.

    Attributes:
        by_weight: Instances of each weight.
    """

    def __init__(
        self, instances: Sequence[RoutingTarget], weights: Mapping[str, Weight], *, few: int = 16
    ) -> None:
        self._few = few
        self.instances = instances
        self._by_bit = {instance.bit: instance for instance in instances}
        # Instances by name.
        self.by_name = {instance.upstream.name: instance for instance in instances}
        self._numbers = {instance: number for number, instance in enumerate(instances)}
        self.all = sum(self._by_bit)
        # Instances that take only requests that find no free slot elsewhere.
        self.spare = sum(instance.bit for instance in instances if instance.is_spare)
        # Instances of this machine.
        self.local = sum(instance.bit for instance in instances if instance.upstream.node is None)
        # Instances that run the profile on trial.
        self.on_trial = sum(instance.bit for instance in instances if instance.upstream.is_on_trial)
        self.free = 0  # Instances with a free slot.
        self._by_use: dict[tuple[int, int], int] = {}
        self._states: dict[RoutingTarget, tuple[int, float, float]] = {}
        self._turns: list[_Place] = []
        self._rates: list[_Place] = []
        self.set_weights(weights)
        self.update(instances)

    def set_weights(self, weights: Mapping[str, Weight]) -> None:
        self.weights = weights
        self.by_weight: dict[float, int] = {}
        for name, instance in self.by_name.items():
            weight = weights[name].value
            self.by_weight[weight] = self.by_weight.get(weight, 0) | instance.bit

    def update(self, changed: Iterable[RoutingTarget]) -> None:
        for instance in changed:
            if instance in self._numbers:
                self._update(instance)

    def weight(self, instance: RoutingTarget) -> float:
        return self.weights[instance.upstream.name].value

    def get(self, name: str | None) -> RoutingTarget | None:
        return self.by_name.get(name) if name else None

    def bits_of(self, names: Iterable[str]) -> int:
        found = filter(None, map(self.get, names))
        return sum({instance.bit for instance in found})

    def peers(self, some: int) -> int:
        """Return the instances that equal these in being spare and in being on trial."""
        spare = self.spare if some & self.spare else ~self.spare
        return self.all & spare & (self.on_trial if some & self.on_trial else ~self.on_trial)

    def free_slots(self, some: int) -> int:
        return sum(
            (slots - in_use) * (some & members).bit_count()
            for (in_use, slots), members in self._by_use.items()
        )

    def usage(self, some: int) -> tuple[int, int]:
        """Return how many slots these instances have in use, and how many in all."""
        used = total = 0
        for (in_use, slots), members in self._by_use.items():
            count = (some & members).bit_count()
            used, total = used + in_use * count, total + slots * count
        return used, total

    def least_loaded(self, some: int) -> int:
        """Return the instances with the smallest share of slots in use, relative to weight."""
        return least(
            (in_use / slots / weight, found)
            for (in_use, slots), members in self._by_use.items()
            if some & members
            for weight, weighted in self.by_weight.items()
            if (found := some & members & weighted)
        )

    def first_turn(self, some: int) -> RoutingTarget:
        if some.bit_count() > self._few:
            return next(instance for _, _, instance in self._turns if instance.bit & some)
        members = self.members(some)
        return min(members, key=lambda instance: (instance.turn, self._numbers[instance]))

    def by_prefill_rate(self, some: int) -> Iterator[RoutingTarget]:
        """Yield instances, the fastest in computing prompts first."""
        if some.bit_count() > self._few:
            return (instance for _, _, instance in self._rates if instance.bit & some)
        return iter(sorted(self.members(some), key=lambda instance: -instance.rates.prefill_tps))

    def few(self, some: int) -> int:
        """Return these instances, or of many the least loaded, free and fastest ones of each."""
        if some.bit_count() <= self._few:
            return some
        found = 0
        for group in (self.least_loaded(some), some & self.free, some):
            for instance in islice(self.by_prefill_rate(group), self._few // 4) if group else ():
                found |= instance.bit
        return found

    def members(self, some: int) -> Iterator[RoutingTarget]:
        while some:
            bit = some & -some
            some ^= bit
            yield self._by_bit[bit]

    def number(self, instance: RoutingTarget) -> int:
        return self._numbers[instance]

    def _update(self, instance: RoutingTarget) -> None:
        now = (len(instance.leases), instance.turn, -instance.rates.prefill_tps)
        before, number = self._states.get(instance), self._numbers[instance]
        slots, self._states[instance] = instance.upstream.slots, now
        if before is None or before[0] != now[0]:
            if before is not None:
                self._by_use[before[0], slots] &= ~instance.bit
            self._by_use[now[0], slots] = self._by_use.get((now[0], slots), 0) | instance.bit
            self.free = self.free | instance.bit if now[0] < slots else self.free & ~instance.bit
        for order, place in ((self._turns, 1), (self._rates, 2)):
            if before is None or before[place] != now[place]:
                if before is not None:
                    del order[bisect_left(order, (before[place], number))]
                insort(order, (now[place], number, instance))


def least(found: Iterable[tuple[float, int]]) -> int:
    """Return the union of the sets with the least value."""
    smallest, union = float("inf"), 0
    for value, some in found:
        if value < smallest:
            smallest, union = value, some
        elif value == smallest:
            union |= some
    return union


_IMBALANCE_THRESHOLD: Final = 2.0
# The smallest weight, relative to the fastest instance's.
_SMALLEST: Final = 1 / 16


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


# Weights of three or more instances are cached for 0.01 s per instance, at least 1 s. Weights of
# many instances are rounded to 1/16, so that instances of equal weight share a set.
_WEIGHED_S: Final = 0.01
_MANY: Final = 16
_WEIGHT_STEPS: Final = 16


class ModelInstances:
    """The instances of one model that are in service, in the order of their admission."""

    def __init__(
        self, in_service: Sequence[RoutingTarget], clock: Clock, *, route_by_speed: bool
    ) -> None:
        self.in_service = in_service
        # Instances that are not silent, or all if all are silent.
        self.answering = [
            instance for instance in in_service if not instance.is_silent
        ] or in_service
        # Instances that prefer pure decode.
        self.pure = [instance for instance in in_service if instance.upstream.prefer_pure_decode]
        # Instances in `answering` that are not spare.
        self.own = [instance for instance in self.answering if not instance.is_spare]
        # The share of conversations for instances on trial; 0 without a trial.
        self.trial_share = max(
            (instance.upstream.trial_share for instance in in_service), default=0.0
        )
        # The number of slots of all instances.
        self.slots = sum(instance.upstream.slots for instance in in_service)
        # Instances in `own` that restore slot files.
        self.with_files = [instance for instance in self.own if instance.upstream.cache_key]
        # The number of slots of `own`.
        self.own_slots = sum(instance.upstream.slots for instance in self.own)
        self._clock = clock
        self._route_by_speed = route_by_speed
        self._changed: set[RoutingTarget] = set()
        for instance in in_service:
            instance.changed = self._changed
        self._weights: Mapping[str, Weight] = {}
        self._weighed: list[Rates] = []
        self._weighed_at_s = -math.inf
        self._sets: InstanceSets | None = None

    @property
    def has_free_slot(self) -> bool:
        if len(self.answering) == 1:  # most models have one instance
            return len(self.answering[0].leases) < self.answering[0].upstream.slots
        return self.sets.free > 0

    @property
    def weights(self) -> Mapping[str, Weight]:
        """Weights by name; those of more than two instances may be seconds old."""
        count, now_s = len(self.in_service), self._clock()
        if count > 2 and now_s < self._weighed_at_s + max(1.0, count * _WEIGHED_S):
            return self._weights
        rates = [instance.rates for instance in self.in_service]
        if rates != self._weighed:
            self._weighed, self._weighed_at_s = rates, now_s
            self._weights = self._weigh()
        return self._weights

    @property
    def sets(self) -> InstanceSets:
        """The instances in `answering`."""
        weights = self.weights
        if self._sets is None:
            self._sets = InstanceSets(self.answering, weights)
        elif self._sets.weights is not weights:
            self._sets.set_weights(weights)
        self._sets.update(self._changed)
        self._changed.clear()
        return self._sets

    def _weigh(self) -> Mapping[str, Weight]:
        speeds: list[Speed] = []
        for instance in self.in_service:
            latency = instance.rates.latency if self._route_by_speed else UNMEASURED
            node = instance.upstream.node
            speeds.append((latency, node.weight if node else None))
        weights = weights_of(speeds)
        if len(weights) > _MANY:
            weights = [
                replace(weight, value=max(1, round(weight.value * _WEIGHT_STEPS)) / _WEIGHT_STEPS)
                if weight.reason == "measured"
                else weight
                for weight in weights
            ]
        names = (instance.upstream.name for instance in self.in_service)
        return dict(zip(names, weights, strict=True))


class Instances:
    """The instances of all models; `local` are those of this machine."""

    def __init__(self, clock: Clock, *, route_by_speed: bool) -> None:
        self._clock = clock
        self._route_by_speed = route_by_speed
        self._instances: dict[str, RoutingTarget] = {}
        self.local: list[RoutingTarget] = []
        self._by_model: dict[str, dict[str, RoutingTarget]] = {}
        self._models: dict[str, ModelInstances] = {}
        self._rates: dict[str, Rates] = {}  # of instances that are out of service

    def __iter__(self) -> Iterator[RoutingTarget]:
        return iter(self._instances.values())

    def get(self, name: str) -> RoutingTarget | None:
        return self._instances.get(name)

    def of_model(self, model: str) -> ModelInstances:
        """Return a model's instances in service; admissions and withdrawals replace the object."""
        found = self._models.get(model)
        if found is None:
            found = ModelInstances((), self._clock, route_by_speed=self._route_by_speed)
            self._models[model] = found
        return found

    def in_service(self, model: str) -> Sequence[RoutingTarget]:
        return self.of_model(model).in_service

    def admit(self, upstream: Upstream, bit: int) -> RoutingTarget:
        """Take an instance into service; a new admission replaces its `upstream`.

        `bit` is the prefix index's bit for its process.
        """
        rates = self._rates.get(upstream.name, Rates())
        instance = self._instances.setdefault(upstream.name, RoutingTarget(upstream, rates))
        before, instance.upstream = instance.upstream, upstream
        instance.in_service, instance.bit = True, bit
        self._by_model.get(before.model, {}).pop(upstream.name, None)
        self._by_model.setdefault(upstream.model, {})[upstream.name] = instance
        if before.node is None or upstream.node is None:
            self._collect_local()
        for model in {before.model, upstream.model}:
            self._collect(model)
        return instance

    def withdraw(self, instance: RoutingTarget) -> None:
        instance.in_service = False
        self._collect(instance.upstream.model)

    def set_silent(self, instance: RoutingTarget, *, is_silent: bool) -> None:
        instance.is_silent = is_silent
        self._collect(instance.upstream.model)

    def discard_if_unused(self, instance: RoutingTarget) -> None:
        """Forget an instance that is out of service once it holds no request."""
        if not (instance.in_flight or instance.leases):
            self._rates[instance.upstream.name] = instance.rates
            if self._instances.pop(instance.upstream.name, None):
                self._by_model[instance.upstream.model].pop(instance.upstream.name)
                if instance.upstream.node is None:
                    self._collect_local()

    def _collect_local(self) -> None:
        self.local = [instance for instance in self if instance.upstream.node is None]

    def _collect(self, model: str) -> None:
        found = self._by_model.get(model, {}).values()
        members = [instance for instance in found if instance.in_service]
        self._models[model] = ModelInstances(
            members, self._clock, route_by_speed=self._route_by_speed
        )

    def forget(self, name: str) -> None:
        self._rates.pop(name, None)


# Gets the instance, and an event that is set whenever the work is wanted again.
InstanceWork = Callable[[RoutingTarget, asyncio.Event], Awaitable[None]]


class InstanceTasks:
    """Background tasks for instances, at most one of a kind for each, while `run` runs."""

    def __init__(self) -> None:
        self.are_running = False
        self._group: asyncio.TaskGroup | None = None
        self._wanted: dict[tuple[str, RoutingTarget], asyncio.Event] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self.are_running = True
                await asyncio.Event().wait()  # as long as the proxy runs
        finally:
            self.are_running, self._group = False, None
            self._wanted.clear()

    def wake(self, kind: str, instance: RoutingTarget, work: InstanceWork) -> None:
        """Start work, or set the event of the work that runs already; nothing without `run`."""
        if event := self._wanted.get((kind, instance)):
            event.set()
        elif self._group:
            event = self._wanted[kind, instance] = asyncio.Event()
            self._group.create_task(self._tend(kind, instance, partial(work, instance, event)))

    async def _tend(
        self, kind: str, instance: RoutingTarget, work: Callable[[], Awaitable[None]]
    ) -> None:
        try:
            await persist(kind, work)
        finally:
            self._wanted.pop((kind, instance), None)
