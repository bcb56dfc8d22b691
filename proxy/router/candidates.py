"""The candidates that the requests in a queue see, one request after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.prompt_cache.cache_hint import CacheHint
from proxy.prompt_cache.prompt import session_hash
from proxy.request import ProxyRequest
from proxy.router.instances import Instance
from proxy.router.lease_times import LeaseTimes
from proxy.router.policy import Candidate, Choice, choose
from proxy.router.weights import Weight
from proxy.settings import Policy

_HASHES: Final = 2**64


class Candidates:
    """The instances of one model at one moment.

    Args:
        instances: Those in service.
        owners: Those that own some of the latest conversations, by how many.
        policy: The rule.
        weights: Of the instances, by name.
        times: How long requests hold a slot.
        trial_share: The share of conversations for the instances on trial; 0 where there is none.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        owners: Mapping[int, int],
        policy: Policy,
        weights: Mapping[str, Weight],
        times: LeaseTimes,
        trial_share: float,
    ) -> None:
        self._instances = instances
        self._owners = owners
        self._policy = policy
        self._weights = weights
        self._times = times
        self._trial_share = trial_share
        self._bound_for: Counter[str] = Counter()
        self._kept: set[Instance] = set()

    def choice(
        self,
        request: ProxyRequest,
        avoid: Collection[str],
        hint: CacheHint,
        waited_s: float,
        held: Collection[str] = (),
    ) -> Choice:
        """Return what a request would do; requests that wait for their owner are remembered.

        Instances in `avoid` are taken only if there is no other, those in `held` not at all now.
        """
        policy = self._policy_of(request)
        owner = hint.owner if policy == "affinity" else None
        on_trial = self._is_on_trial(request, hint)
        instances, share = self._instances_for(request, avoid, hint, held, on_trial=on_trial)
        candidates = [self._candidate(one, request, hint, held) for one in instances]
        tokens = request.prompt.tokens if request.prompt else 0
        choice = choose(policy, candidates, tokens, owner, waited_s, on_trial=on_trial, share=share)
        if self._trial_share:
            is_diverted = any(
                one.name == choice.name and one.is_on_trial != on_trial for one in candidates
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
    ) -> tuple[list[Instance], float | None]:
        """Return those that the request could get, and their `share` where that is not all."""
        del hint, held, on_trial
        instances = self._admitted(request)
        return [one for one in instances if one.upstream.name not in avoid] or instances, None

    def _admitted(self, request: ProxyRequest) -> list[Instance]:
        return [one for one in self._instances if one.may_take(request) and one not in self._kept]

    def bind(self, owner: Instance) -> None:
        """Note that one more request waits for an instance."""
        self._bound_for[owner.upstream.name] += 1

    def find(self, name: str | None) -> Instance | None:
        return next((one for one in self._instances if one.upstream.name == name), None)

    def get(self, name: str) -> Instance:
        return next(one for one in self._instances if one.upstream.name == name)

    def weight(self, name: str) -> float:
        return self._weights[name].value

    def _owned(self, instance: Instance) -> int:
        return next((count for count, some in self._owners.items() if some & instance.bit), 0)

    def _is_on_trial(self, request: ProxyRequest, hint: CacheHint) -> bool:
        """Return whether a conversation is part of the trial: where it is, or by its beginning."""
        if not self._trial_share:
            return False
        for instance in self._instances:
            if instance.upstream.name == hint.owner:
                return instance.upstream.is_on_trial
        return is_in_share(self._trial_share, request)

    def _keep(self, request: ProxyRequest, owner: str | None) -> None:
        """Keep slots for a request that needs several: those behind it would take each free one.

        Of its owner, or of the instance that lacks the fewest.
        """
        if instances := self._admitted(request):
            self._kept.add(
                min(
                    instances,
                    key=lambda one: (one.upstream.name != owner, one.needed(request) - one.free),
                )
            )

    def _candidate(
        self,
        instance: Instance,
        request: ProxyRequest,
        hint: CacheHint,
        held: Collection[str],
    ) -> Candidate:
        upstream, needed = instance.upstream, instance.needed(request)
        weight = self.weight(upstream.name)
        turns = 0 if instance.free >= needed else 1 + self._bound_for[upstream.name]
        return Candidate(
            name=upstream.name,
            slots=upstream.slots,
            slots_in_use=len(instance.leases),
            turn=instance.turn,
            conversations=self._owned(instance),
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
    """Return whether a request's conversation is in this share of all, above 0 and below 1.

    A hash of how it begins decides, so that all its turns agree, also after a restart, and a larger
    share contains a smaller one. A request without a prompt is a conversation of its own.
    """
    return _conversation_hash(request) < share * _HASHES


def _conversation_hash(request: ProxyRequest) -> int:
    if request.session:
        return session_hash(request.model, request.client, request.session)
    if request.prompt:
        return xxh3_64_intdigest(request.client.encode(), request.prompt.beginning)
    return xxh3_64_intdigest(request.request_id.encode())
