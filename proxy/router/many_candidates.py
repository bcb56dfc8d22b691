"""The candidates, of which only those that a request could get are looked at."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from proxy.prompt_cache.cache_hint import CacheHint
from proxy.request import ProxyRequest
from proxy.router.candidates import Candidates
from proxy.router.instance_sets import InstanceSets
from proxy.router.instances import Instance
from proxy.router.lease_times import LeaseTimes
from proxy.router.shortlist import Shortlist
from proxy.settings import Policy


class ManyCandidates(Candidates):
    """Makes the choices of `Candidates`; what is rare, such as several slots, costs as much."""

    def __init__(
        self,
        sets: InstanceSets,
        owners: Mapping[int, int],
        policy: Policy,
        times: LeaseTimes,
        trial_share: float,
    ) -> None:
        super().__init__(sets.instances, owners, policy, sets.weights, times, trial_share)
        self._sets = sets
        without = sets.all
        for some in owners.values():
            without &= ~some
        self._all_owners = {0: without, **owners}

    def find(self, name: str | None) -> Instance | None:
        return self._sets.get(name)

    def get(self, name: str) -> Instance:
        return self._sets.get(name) or super().get(name)

    def _instances_for(
        self,
        request: ProxyRequest,
        avoid: Collection[str],
        hint: CacheHint,
        held: Collection[str],
        *,
        on_trial: bool,
    ) -> tuple[list[Instance], float | None]:
        if request.slots > 1 or request.remote_variant or self._kept:
            return super()._instances_for(request, avoid, hint, held, on_trial=on_trial)
        sets, prompt = self._sets, request.prompt
        candidates = sets.local if request.is_from_proxy else sets.all
        candidates = (avoid and candidates & ~sets.named(avoid)) or candidates
        free = candidates & sets.free & ~sets.named(held)
        if not free:
            return [], 0.0
        tokens = prompt.tokens if prompt else 0
        shortlist = Shortlist(sets, self._all_owners, hint, tokens, self._times.decode_s)
        return shortlist.find(self._policy_of(request), candidates, free, on_trial=on_trial)
