"""The candidates for the requests in a queue, which choose one after the other.

Among many instances, a request considers only a shortlist: the instances that a rule of `policy`
could prefer are found in sets of instances. So the choice in the shortlist is the choice among all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.cache.index import CacheHint
from proxy.cache.prompt import session_hash
from proxy.request.request import ProxyRequest
from proxy.router.lease import RoutingTarget
from proxy.router.policy import WORTH_TOKENS, Candidate, Choice, choose, conversations_max
from proxy.router.registry import InstanceSets, least
from proxy.settings import Policy
from proxy.upstream.upstream import Timings, average

_HASHES: Final = 2**64
# Assumed time for which a request holds a slot, before the first has finished.
_HELD_S: Final = 2.0


class LeaseTimes:
    """Averages over finished requests."""

    def __init__(self) -> None:
        self.held_s = _HELD_S  # Time from the lease of a slot to the end of the response.
        self.decode_s = 0.0  # The part of it from the first to the last token.

    def note(self, held_s: float, timings: Timings | None) -> None:
        self.held_s = average(self.held_s, held_s)
        if timings:
            self.decode_s = average(self.decode_s, timings.decode_ms / 1000)

    def wait_s(self, waiting: int, slots: int) -> float:
        return self.held_s * (waiting + 1) / max(1, slots)


class Candidates:
    """The instances of one model at one moment.

    Args:
        sets: Instances in service.
        owners: Sets of instances by the number of the latest conversations that they own, above 0.
        policy: The rule.
        times: Average times for which requests hold a slot.
        trial_share: The share of conversations for instances on trial; 0 without a trial.
    """

    def __init__(
        self,
        sets: InstanceSets,
        owners: Mapping[int, int],
        policy: Policy,
        times: LeaseTimes,
        trial_share: float,
    ) -> None:
        self._sets = sets
        without = sets.all
        for some in owners.values():
            without &= ~some
        self._owners = {0: without, **owners}
        self._policy = policy
        self._times = times
        self._trial_share = trial_share
        self._bound_for: Counter[str] = Counter()
        self._kept: set[RoutingTarget] = set()

    def choice(
        self,
        request: ProxyRequest,
        avoid: Collection[str],
        hint: CacheHint,
        waited_s: float,
        held: Collection[str] = (),
    ) -> Choice:
        """Return the decision for a request, and count it if it waits for its owner.

        Instances in `avoid` are taken only if there is no other, those in `held` not now.
        """
        policy = self._policy_of(request)
        owner = hint.owner if policy == "affinity" else None
        on_trial = self._is_on_trial(request, hint)
        instances, share = self._instances_for(request, avoid, hint, held, on_trial=on_trial)
        candidates = [self._candidate(instance, request, hint, held) for instance in instances]
        tokens = request.prompt.tokens if request.prompt else 0
        choice = choose(policy, candidates, tokens, owner, waited_s, on_trial=on_trial, share=share)
        if self._trial_share:
            is_diverted = any(
                candidate.name == choice.name and candidate.is_on_trial != on_trial
                for candidate in candidates
            )
            choice = replace(choice, is_diverted=is_diverted)
        if choice.name is None and owner is not None:
            self._bound_for[owner] += 1
        if choice.name is None and request.slots > 1 and not held:
            self._keep(request, owner)
        return choice

    def _policy_of(self, request: ProxyRequest) -> Policy:
        is_without = request.prompt is None and self._policy == "affinity"
        return "least-busy" if is_without else self._policy

    def _instances_for(
        self,
        request: ProxyRequest,
        avoid: Collection[str],
        hint: CacheHint,
        held: Collection[str],
        *,
        on_trial: bool,
    ) -> tuple[list[RoutingTarget], float | None]:
        """Return the instances to choose among, and `share` for `choose`; None: these are all."""
        if request.slots > 1 or request.remote_variant or self._kept:  # rare: compare all
            return self._all_for(request, avoid), None
        sets = self._sets
        candidates = sets.local if request.is_from_proxy else sets.all
        candidates = (avoid and candidates & ~sets.bits_of(avoid)) or candidates
        free = candidates & sets.free & ~sets.bits_of(held)
        if not free:
            return [], 0.0
        tokens = request.prompt.tokens if request.prompt else 0
        shortlist = Shortlist(sets, self._owners, hint, tokens, self._times.decode_s)
        return shortlist.find(self._policy_of(request), candidates, free, on_trial=on_trial)

    def _all_for(self, request: ProxyRequest, avoid: Collection[str]) -> list[RoutingTarget]:
        instances = self._admissible(request)
        return [
            instance for instance in instances if instance.upstream.name not in avoid
        ] or instances

    def _admissible(self, request: ProxyRequest) -> list[RoutingTarget]:
        return [
            instance
            for instance in self._sets.instances
            if instance.may_take(request) and instance not in self._kept
        ]

    def bind(self, owner: RoutingTarget) -> None:
        self._bound_for[owner.upstream.name] += 1

    def _is_on_trial(self, request: ProxyRequest, hint: CacheHint) -> bool:
        """Return whether a conversation is part of the trial: by its owner, or by its beginning."""
        if not self._trial_share:
            return False
        owner = self._sets.get(hint.owner)
        return owner.upstream.is_on_trial if owner else is_in_share(self._trial_share, request)

    def _keep(self, request: ProxyRequest, owner: str | None) -> None:
        """Reserve an instance for a request that needs several slots.

        Otherwise, requests behind it would take each free slot. It is the request's owner, or the
        instance that lacks the fewest slots.
        """
        if instances := self._admissible(request):
            self._kept.add(
                min(
                    instances,
                    key=lambda instance: (
                        instance.upstream.name != owner,
                        instance.slots_needed(request) - instance.free,
                    ),
                )
            )

    def _candidate(
        self, instance: RoutingTarget, request: ProxyRequest, hint: CacheHint, held: Collection[str]
    ) -> Candidate:
        upstream, needed = instance.upstream, instance.slots_needed(request)
        weight = self._sets.weight(instance)
        turns = 0 if instance.free >= needed else 1 + self._bound_for[upstream.name]
        return Candidate(
            name=upstream.name,
            slots=upstream.slots,
            slots_in_use=len(instance.leases),
            turn=instance.turn,
            conversations=next(
                count for count, some in self._owners.items() if some & instance.bit
            ),
            cached_tokens=hint.cached_tokens(instance.bit),
            saved_tokens=hint.saved_tokens(instance.bit),
            backlog_tokens=instance.backlog_tokens,
            prefill_tps=instance.rates.prefill_tps,
            decode_s=self._times.decode_s / weight,
            free_in_s=turns * self._times.held_s / (upstream.slots * weight),
            is_spare=instance.is_spare,
            needed=needed,
            is_on_trial=upstream.is_on_trial,
            weight=weight,
            is_held=upstream.name in held,
        )


def is_in_share(share: float, request: ProxyRequest) -> bool:
    """Return whether a conversation belongs to this share of all, above 0 and below 1.

    A hash of its beginning decides, so that all its turns agree, also after a restart, and a larger
    share contains a smaller one. A request without a prompt is a conversation of its own.
    """
    if request.session:
        digest = session_hash(request.model, request.client, request.session)
    elif request.prompt:
        digest = xxh3_64_intdigest(request.client.encode(), request.prompt.beginning)
    else:
        digest = xxh3_64_intdigest(request.request_id.encode())
    return digest < share * _HASHES


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Finds the instances that one request could prefer."""

    sets: InstanceSets  # All instances of its model.
    # Sets of instances by their number of the latest conversations, 0 included.
    owners: Mapping[int, int]
    hint: CacheHint  # Expected cache contents for its prompt.
    tokens: int  # Tokens of its prompt.
    decode_s: float  # See `LeaseTimes.decode_s`.

    def find(
        self, policy: Policy, candidates: int, free: int, *, on_trial: bool
    ) -> tuple[list[RoutingTarget], float]:
        """Return instances in the order of their admission, and `share` for `policy.choose`.

        Args:
            policy: The rule.
            candidates: Instances that may take the request.
            free: The candidates with a free slot; at least one.
            on_trial: See `policy.choose`.
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

    def _has_useful_cache(self, instance: RoutingTarget) -> bool:
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

    def _for_new_conversation(self, allowed: int) -> list[RoutingTarget]:
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

    def _faster(self, than: RoutingTarget, some: int) -> Iterator[RoutingTarget]:
        """Yield the instance of a higher weight that would answer first, if there is one."""
        limit = self.sets.weight(than)
        faster = sum(members for weight, members in self.sets.by_weight.items() if weight > limit)
        if some & faster:
            yield self._soonest(some & faster, by_turn=False)

    def _soonest(self, some: int, *, by_turn: bool) -> RoutingTarget:
        """Return the instance that would answer first if its slot were free now."""
        least_decode_s = self.decode_s / max(self.sets.by_weight)
        uncached = some
        for _, holders in self.hint.cached:
            uncached &= ~holders
        found: tuple[float, float, int, RoutingTarget] | None = None
        for tokens, holders in (*self.hint.cached, (0, uncached)):
            new_tokens = max(0, self.tokens - tokens)
            for instance in self.sets.by_prefill_rate(some & holders):
                prefill_tps = instance.rates.prefill_tps
                if found and new_tokens / prefill_tps + least_decode_s > found[0]:
                    break  # the following ones are slower
                decode_s = self.decode_s / self.sets.weight(instance)
                answered_in_s = (instance.backlog_tokens + new_tokens) / prefill_tps + decode_s
                turn = instance.turn if by_turn else 0.0
                place = answered_in_s, turn, self.sets.number(instance), instance
                found = min(found or place, place)
        assert found is not None  # noqa: S101 (for the type: `some` is not empty)
        return found[3]
