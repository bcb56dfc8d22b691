"""The routing policies: which of the candidates takes a request.

`affinity`, the default:

1. A conversation goes to its owner, if the owner's cache holds at least 64 of its tokens. It moves
   if the owner has no free slot, another instance has one, and waiting takes longer than the answer
   there: the prompt's time plus a quarter, plus the time to refill the owner's cache as far as no
   slot file holds it. It also waits no longer than that, so a wrong estimate costs at most twice
   the move. A slot for which other conversations of its instance wait is free only after their
   turns: if they exchanged their places, each would compute its prompt again. It then waits up to
   half of its timeout. It leaves an owner with a free slot only for a faster instance, by the same
   rule.
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

A choice looks at sets of instances, and compares few of them, so that a thousand instances cost as
much as two. The requests in a queue choose one after the other.

Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.cache.index import CacheHint, most_tokens
from proxy.cache.prompt import session_hash
from proxy.request.request import ProxyRequest
from proxy.router.lease import LeaseTimes, RoutingTarget
from proxy.router.registry import InstanceSets, least
from proxy.settings import Policy

# The most conversations of an instance, as a multiple of its share.
_SHARE: Final = 1.25
# How much sooner another instance must answer.
_SOONER: Final = 1.25
# Computing fewer tokens is as fast as finding them in a cache.
_WORTH_TOKENS: Final = 64
# The share of its timeout after which a request takes also a slot that others wait for.
_OVERDUE: Final = 0.5
_HASHES: Final = 2**64

# The instance whose slot a request takes, or None: it waits; and the seconds until it leaves its
# owner for a slot that is free elsewhere, None if no slot is free.
Choice = tuple[RoutingTarget | None, float | None]


class Candidates:
    """The instances of one model at one moment.

    Args:
        sets: Instances in service.
        owners: Sets of instances by the number of the latest conversations that they own, above 0.
        policy: The rule.
        times: Average times for which requests hold a slot.
        trial_share: The share of conversations for instances on trial; 0 without a trial.
        waiting: Requests in the queue, by the instance that owns their conversation.
    """

    def __init__(
        self,
        sets: InstanceSets,
        owners: Mapping[int, int],
        policy: Policy,
        times: LeaseTimes,
        trial_share: float,
        waiting: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.sets = sets
        without = sets.all
        for some in owners.values():
            without &= ~some
        self.owners = {0: without, **owners}
        self.times = times
        self._waiting = waiting
        self._policy = policy
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
        """Return the choice for a request, and count it if it waits for its owner.

        Instances in `avoid` are taken only if there is no other, those in `held` not now.
        """
        sets, chosen, moves_in_s = self.sets, None, None
        admissible = self._admissible(request)
        admissible = admissible & ~sets.bits_of(avoid) or admissible
        free = admissible & sets.free & ~sets.bits_of(held)
        if request.slots > 1:
            fitting = (member for member in sets.members(free) if member.can_take(request))
            free = sum(member.bit for member in fitting)
        is_by_cache = self._policy == "affinity" and request.prompt is not None
        if free:
            side = sets.on_trial if self.is_on_trial(request, hint) else ~sets.on_trial
            side = free & side or free
            first = side & ~sets.spare or side
            if is_by_cache:
                decision = _ByCache(self, request, hint, admissible, first)
                chosen, moves_in_s = decision.choice(side, waited_s)
            elif self._policy == "round-robin":
                chosen = sets.first_turn(first)
            else:
                chosen = sets.first_turn(sets.least_loaded(first))
        if chosen is None:
            if is_by_cache and hint.owner is not None:
                self._bound_for[hint.owner] += 1
            if request.slots > 1 and not held:
                self._keep(request, hint.owner if is_by_cache else None)
        return chosen, moves_in_s

    def bind(self, owner: RoutingTarget) -> None:
        self._bound_for[owner.upstream.name] += 1

    def is_on_trial(self, request: ProxyRequest, hint: CacheHint) -> bool:
        """Return whether a conversation is part of the trial: by its owner, or by its beginning."""
        if not self._trial_share:
            return False
        owner = self.sets.get(hint.owner)
        return owner.upstream.is_on_trial if owner else is_in_share(self._trial_share, request)

    def is_diverted(self, request: ProxyRequest, hint: CacheHint, chosen: RoutingTarget) -> bool:
        """Return whether the request's side of a trial had no slot for it."""
        is_on_trial = self.is_on_trial(request, hint)
        return bool(self._trial_share) and chosen.upstream.is_on_trial != is_on_trial

    def free_in_s(self, instance: RoutingTarget, request: ProxyRequest) -> float:
        """Return the estimated seconds until an instance has the slots for a request."""
        if instance.can_take(request):
            return 0.0
        return self._turns_s(instance, 1 + self._bound_for[instance.upstream.name])

    def others_wait_s(self, instance: RoutingTarget) -> float:
        """Return the estimated seconds for the turns of all that wait for an instance."""
        return self._turns_s(instance, self._waiting.get(instance.upstream.name, 0))

    def _turns_s(self, instance: RoutingTarget, turns: int) -> float:
        return turns * self.times.held_s / (instance.upstream.slots * self.sets.weight(instance))

    def _admissible(self, request: ProxyRequest) -> int:
        """Return the instances that may take a request."""
        is_rare = request.slots > 1 or request.remote_variant or request.adapter
        if not (is_rare or self._kept):
            return self.sets.local if request.is_from_proxy else self.sets.all
        return sum(
            instance.bit
            for instance in self.sets.instances
            if instance.may_take(request) and instance not in self._kept
        )

    def _keep(self, request: ProxyRequest, owner: str | None) -> None:
        """Reserve an instance for a request that needs several slots.

        Otherwise, requests behind it would take each free slot. It is the request's owner, or the
        instance that lacks the fewest slots.
        """

        def lack(instance: RoutingTarget) -> tuple[bool, int]:
            missing = instance.slots_needed(request) - instance.free
            return instance.upstream.name != owner, missing

        if instances := list(self.sets.members(self._admissible(request))):
            self._kept.add(min(instances, key=lack))


def is_in_share(share: float, request: ProxyRequest) -> bool:
    """Return whether a conversation belongs to this share of all, above 0 and below 1.

    A hash of its beginning decides, so that all its turns agree, also after a restart, and a larger
    share contains a smaller one. A request without a prompt is a separate conversation.
    """
    if request.session:
        digest = session_hash(request.model, request.client, request.session)
    elif request.prompt:
        digest = xxh3_64_intdigest(request.client.encode(), request.prompt.beginning)
    else:
        digest = xxh3_64_intdigest(request.request_id.encode())
    return digest < share * _HASHES


class _ByCache:
    """The choice for one request with the policy `affinity`.

    Args:
        candidates: The instances of its model.
        request: It has a prompt.
        hint: Expected cache contents for its prompt.
        admissible: Instances that may take it.
        first: Those with a free slot that it prefers; at least one.
    """

    def __init__(
        self,
        candidates: Candidates,
        request: ProxyRequest,
        hint: CacheHint,
        admissible: int,
        first: int,
    ) -> None:
        self._model = candidates
        self._request = request
        self._hint = hint
        self._admissible = admissible
        self._sets = sets = candidates.sets
        self._owners = candidates.owners
        self._tokens = request.prompt.tokens if request.prompt else 0
        # An equal share of the latest conversations for an instance of weight 1.
        peers = admissible & sets.peers(first)
        count = sum(count * (some & peers).bit_count() for count, some in self._owners.items())
        self._share = count / sum(
            weight * (some & peers).bit_count() for weight, some in sets.by_weight.items()
        )
        self._first = first
        self._below_share = self._find_below_share()

    def choice(self, free: int, waited_s: float) -> Choice:
        """Choose among instances with a free slot."""
        owner = self._sets.get(self._hint.owner)
        if owner is None or not owner.bit & self._admissible or not self._is_useful(owner):
            return self._for_new_conversation(self._below_share or self._first), None
        if owner.bit & free:
            faster = self._faster(owner, self._below_share)
            return (faster if faster and self._worth_s(owner, faster) < 0 else owner), None
        best = self._soonest(free, by_turn=True)
        worth_s = longest_s = self._worth_s(owner, best)
        if others_s := self._model.others_wait_s(best):
            worth_s += others_s
            longest_s = max(worth_s, _OVERDUE * self._request.queue_timeout_s)
        if self._model.free_in_s(owner, self._request) > worth_s or waited_s >= longest_s:
            return best, None
        return None, longest_s - waited_s

    def _is_useful(self, instance: RoutingTarget) -> bool:
        return self._hint.cached_tokens(instance.bit) >= _WORTH_TOKENS

    def _prefilled_in_s(self, instance: RoutingTarget) -> float:
        """Return when the prompt would be computed, if a slot were free now."""
        new_tokens = max(0, self._tokens - self._hint.cached_tokens(instance.bit))
        return (instance.backlog_tokens + new_tokens) / instance.rates.prefill_tps

    def _decode_s(self, instance: RoutingTarget) -> float:
        return self._model.times.decode_s / self._sets.weight(instance)

    def _answered_in_s(self, instance: RoutingTarget) -> float:
        """Return when the answer would be complete, if a slot were free now."""
        return self._prefilled_in_s(instance) + self._decode_s(instance)

    def _worth_s(self, owner: RoutingTarget, other: RoutingTarget) -> float:
        """Return the longest wait for the owner that costs no more than a move to `other`."""
        unsaved = self._hint.cached_tokens(owner.bit) - most_tokens(self._hint.saved, owner.bit)
        there_s = _SOONER * self._prefilled_in_s(other) + self._decode_s(other)
        return there_s + unsaved / owner.rates.prefill_tps - self._answered_in_s(owner)

    def _find_below_share(self) -> int:
        """Return those of `first` that may get a further conversation."""
        found = 0
        for weight, weighted in self._sets.by_weight.items():
            for count, some in self._owners.items():
                if count < _SHARE * self._share * weight + 1:
                    found |= self._first & some & weighted
        return found

    def _for_new_conversation(self, allowed: int) -> RoutingTarget:
        sets = self._sets
        best = sets.first_turn(sets.least_loaded(self._fewest_owned(self._most_cached(allowed))))
        faster = self._faster(best, allowed) if self._is_useful(best) else None
        is_sooner = faster and _SOONER * self._answered_in_s(faster) < self._answered_in_s(best)
        return faster if faster and is_sooner else best

    def _most_cached(self, some: int) -> int:
        found, worth = 0, 1
        for tokens, holders in self._hint.cached:
            if tokens // _WORTH_TOKENS < worth:
                break
            if some & holders:
                found, worth = found | some & holders, tokens // _WORTH_TOKENS
        return found or some

    def _fewest_owned(self, some: int) -> int:
        return least(
            ((count + 1) / weight, found)
            for count, owners in self._owners.items()
            if some & owners
            for weight, weighted in self._sets.by_weight.items()
            if (found := some & owners & weighted)
        )

    def _faster(self, than: RoutingTarget, some: int) -> RoutingTarget | None:
        """Return the instance of a higher weight that would answer first, if there is one."""
        limit = self._sets.weight(than)
        faster = sum(members for weight, members in self._sets.by_weight.items() if weight > limit)
        return self._soonest(some & faster, by_turn=False) if some & faster else None

    def _soonest(self, some: int, *, by_turn: bool) -> RoutingTarget:
        """Return the instance that would answer first if its slot were free now."""
        least_decode_s = self._model.times.decode_s / max(self._sets.by_weight)
        uncached = some
        for _, holders in self._hint.cached:
            uncached &= ~holders
        found: tuple[float, float, int, RoutingTarget] | None = None
        for tokens, holders in (*self._hint.cached, (0, uncached)):
            new_tokens = max(0, self._tokens - tokens)
            for instance in self._sets.by_prefill_rate(some & holders):
                prefill_tps = instance.rates.prefill_tps
                if found and new_tokens / prefill_tps + least_decode_s > found[0]:
                    break  # the following ones are slower
                turn = instance.turn if by_turn else 0.0
                number = self._sets.number(instance)
                place = self._answered_in_s(instance), turn, number, instance
                found = min(found or place, place)
        assert found is not None  # noqa: S101 (for the type: `some` is not empty)
        return found[3]
