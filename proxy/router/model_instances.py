"""The instances of one model that are in service, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from proxy.router.instance_sets import InstanceSets
from proxy.router.instances import Instance
from proxy.router.response_progress import Clock
from proxy.router.weights import Weight, weights_of
from proxy.upstream.rates import Rates

# Weights of more instances than two are computed once in so many seconds for each of them, at least
# a second; those of many in steps of an average one: instances of equal weight are one set.
_WEIGHED_S: Final = 0.01
_MANY: Final = 16
_WEIGHT_STEPS: Final = 16


class ModelInstances:
    """Instances in the order of their admission.

    Attributes:
        answering: Those that are not silent; all of them where all are.
        pure: Those that prefer pure decode.
        own: Those that answer and are not spare.
        with_files: Of `own`, those that restore slot files.
        slots: Of all of them.
        trial_share: The share of conversations for those on trial; 0 where there is none.
        own_slots: Of `own`.
    """

    def __init__(
        self, in_service: Sequence[Instance], clock: Clock, *, route_by_speed: bool
    ) -> None:
        self.in_service = in_service
        self.answering = [one for one in in_service if not one.is_silent] or in_service
        self.pure = [one for one in in_service if one.upstream.prefer_pure_decode]
        self.own = [one for one in self.answering if not one.is_spare]
        self.trial_share = max((one.upstream.trial_share for one in in_service), default=0.0)
        self.slots = sum(one.upstream.slots for one in in_service)
        self.with_files = [one for one in self.own if one.upstream.cache_key]
        self.own_slots = sum(one.upstream.slots for one in self.own)
        self._clock = clock
        self._route_by_speed = route_by_speed
        self._changed: set[Instance] = set()
        for one in in_service:
            one.changed = self._changed
        self._weights: Mapping[str, Weight] = {}
        self._weighed: list[Rates] = []
        self._weighed_at_s = -math.inf
        self._sets: InstanceSets | None = None

    @property
    def has_free_slot(self) -> bool:
        """Whether one of those that answer has a slot free."""
        if sets := self.sets:
            return sets.free > 0
        return any(len(one.leases) < one.upstream.slots for one in self.answering)

    @property
    def has_free_spare(self) -> bool:
        """Whether one of the others has."""
        if sets := self.sets:
            return sets.free & sets.spare > 0
        return any(one.has_free_slot for one in self.answering if one.is_spare)

    @property
    def own_free(self) -> int:
        """Free slots of `own`."""
        if sets := self.sets:
            return sets.free_slots(sets.all & ~sets.spare)
        return sum(one.free for one in self.own)

    @property
    def weights(self) -> Mapping[str, Weight]:
        """By name; of more than two instances seconds old."""
        count, now_s = len(self.in_service), self._clock()
        if count > 2 and now_s < self._weighed_at_s + max(1.0, count * _WEIGHED_S):
            return self._weights
        rates = [one.rates for one in self.in_service]
        if rates != self._weighed:
            self._weighed, self._weighed_at_s = rates, now_s
            self._weights = self._weigh()
        return self._weights

    @property
    def sets(self) -> InstanceSets | None:
        """Those that answer as sets; None where there is only one."""
        if len(self.answering) < 2:
            return None
        weights = self.weights
        if self._sets is None:
            self._sets = InstanceSets(self.answering, weights)
        elif self._sets.weights is not weights:
            self._sets.set_weights(weights)
        self._sets.update(self._changed)
        self._changed.clear()
        return self._sets

    def _weigh(self) -> Mapping[str, Weight]:
        speeds = [one.speed(is_measured=self._route_by_speed) for one in self.in_service]
        weights = weights_of(speeds)
        if len(weights) > _MANY:
            weights = [_rounded(one) if one.reason == "measured" else one for one in weights]
        names = (instance.upstream.name for instance in self.in_service)
        return dict(zip(names, weights, strict=True))


def _rounded(weight: Weight) -> Weight:
    return replace(weight, value=max(1, round(weight.value * _WEIGHT_STEPS)) / _WEIGHT_STEPS)
