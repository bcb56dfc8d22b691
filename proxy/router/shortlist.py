"""Which few of many instances a request can get at all, so that `policy` need not compare the rest.

Those that each rule of `policy` could prefer are found in sets of instances; so the choice among
these few is the choice among all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proxy.prompt_cache.cache_hint import CacheHint
from proxy.router.instance_sets import InstanceSets, least
from proxy.router.instances import Instance
from proxy.router.policy import WORTH_TOKENS, conversations_max
from proxy.settings import Policy


@dataclass(frozen=True, slots=True)
class Shortlist:
    """For one request.

    Attributes:
        sets: All instances of its model.
        owners: Those that own some of the latest conversations, by how many: 0 and more.
        hint: What the caches hold of its prompt.
        tokens: Of its prompt.
        decode_s: As of `LeaseTimes`.
    """

    sets: InstanceSets
    owners: Mapping[int, int]
    hint: CacheHint
    tokens: int
    decode_s: float

    def find(
        self, policy: Policy, candidates: int, free: int, *, on_trial: bool
    ) -> tuple[list[Instance], float]:
        """Return them in the order of their admission, and the `share` of `policy.choose`.

        Args:
            policy: The rule.
            candidates: Those that may take the request.
            free: Of those, the ones with a free slot for it; at least one.
            on_trial: As of `policy.choose`.
        """
        sets = self.sets
        free_here = free & (sets.on_trial if on_trial else ~sets.on_trial) or free
        first = free_here & ~sets.spare or free_here
        if policy == "round-robin":
            return [sets.first_turn(first)], 0.0
        if policy == "least-busy":
            return [sets.first_turn(sets.least_loaded(first))], 0.0
        share = self._share(candidates & sets.peers(first))
        owner = sets.get(self.hint.owner)
        if owner is None or not owner.bit & candidates or not self._has_useful_cache(owner):
            found = self._for_new_conversation(self._below_share(first, share) or first)
        elif owner.bit & free:
            found = [owner, *self._faster(owner, self._below_share(first, share))]
        else:
            found = [owner, self._soonest(free_here, by_turn=True)]
        return sorted({*found}, key=sets.number), share

    def _has_useful_cache(self, instance: Instance) -> bool:
        return self.hint.cached_tokens(instance.bit) >= WORTH_TOKENS

    def _share(self, peers: int) -> float:
        count = sum(count * (some & peers).bit_count() for count, some in self.owners.items())
        return count / sum(
            weight * (some & peers).bit_count() for weight, some in self.sets.by_weight.items()
        )

    def _below_share(self, free: int, share: float) -> int:
        found = 0
        for weight, weighted in self.sets.by_weight.items():
            most = conversations_max(share, weight)
            for count, some in self.owners.items():
                if count < most:
                    found |= free & some & weighted
        return found

    def _for_new_conversation(self, allowed: int) -> list[Instance]:
        most_cached = self._most_cached(allowed)
        best = self.sets.first_turn(self.sets.least_loaded(self._fewest_owned(most_cached)))
        return [best, *(self._faster(best, allowed) if self._has_useful_cache(best) else ())]

    def _most_cached(self, some: int) -> int:
        found, worth = 0, 1
        for tokens, holders in self.hint.cached:
            if tokens // WORTH_TOKENS < worth:
                break
            if some & holders:
                found, worth = found | some & holders, tokens // WORTH_TOKENS
        return found or some

    def _fewest_owned(self, some: int) -> int:
        return least(
            ((count + 1) / weight, found)
            for count, owners in self.owners.items()
            if some & owners
            for weight, weighted in self.sets.by_weight.items()
            if (found := some & owners & weighted)
        )

    def _faster(self, than: Instance, some: int) -> Iterator[Instance]:
        """Yield the one of a higher weight that would answer first, if there is one."""
        limit = self.sets.weight(than)
        faster = sum(members for weight, members in self.sets.by_weight.items() if weight > limit)
        if some & faster:
            yield self._soonest(some & faster, by_turn=False)

    def _soonest(self, some: int, *, by_turn: bool) -> Instance:
        """Return the one that would answer first with a slot free now."""
        least_decode_s = self.decode_s / max(self.sets.by_weight)
        found: tuple[float, float, int, Instance] | None = None
        for tokens, holders in (*self.hint.cached, (0, self._without_cache(some))):
            new_tokens = max(0, self.tokens - tokens)
            for one in self.sets.by_prefill_rate(some & holders):
                prefill_tps = one.rates.prefill_tps
                if found and new_tokens / prefill_tps + least_decode_s > found[0]:
                    break  # as are all that follow
                decode_s = self.decode_s / self.sets.weight(one)
                answered_in_s = (one.backlog_tokens + new_tokens) / prefill_tps + decode_s
                turn = one.turn if by_turn else 0.0
                place = answered_in_s, turn, self.sets.number(one), one
                found = min(found or place, place)
        assert found is not None  # noqa: S101 (for the type: there is one at least)
        return found[3]

    def _without_cache(self, some: int) -> int:
        for _, holders in self.hint.cached:
            some &= ~holders
        return some
