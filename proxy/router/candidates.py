"""The candidates that the requests in a queue see, one request after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.prompt_cache.index import CacheHint
from proxy.prompt_cache.prompt import session_hash
from proxy.request import ProxyRequest
from proxy.router.instances import Instance
from proxy.router.policy import Candidate, Choice, choose
from proxy.router.weights import Weight
from proxy.settings import Policy

_HASHES: Final = 2**64


class Candidates:
    """The instances of one model at one moment.

    Args:
        instances: Those in service.
        conversations: How many of the latest conversations each instance owns, by name.
        policy: The rule.
        weights: Of the instances, by name.
        held_s: How long a request holds a slot, on average.
        decode_s: Of this, from the first to the last token.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        conversations: Mapping[str, int],
        policy: Policy,
        weights: Mapping[str, Weight],
        held_s: float,
        decode_s: float,
    ) -> None:
        self._instances = instances
        self._conversations = conversations
        self._policy = policy
        self._weights = weights
        self._held_s = held_s
        self._decode_s = decode_s
        self._trial_share = max((one.upstream.trial_share for one in instances), default=0.0)
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
        instances = [
            one for one in self._instances if one.may_take(request) and one not in self._kept
        ]
        prompt = request.prompt
        policy = "least-busy" if prompt is None and self._policy == "affinity" else self._policy
        owner = hint.owner if policy == "affinity" else None
        others = [instance for instance in instances if instance.upstream.name not in avoid]
        candidates = [self._candidate(one, request, hint, held) for one in others or instances]
        tokens = prompt.tokens if prompt else 0
        on_trial = self._is_on_trial(request, hint)
        choice = choose(policy, candidates, tokens, owner, waited_s, on_trial=on_trial)
        if self._trial_share:
            is_diverted = any(
                one.name == choice.name and one.is_on_trial != on_trial for one in candidates
            )
            choice = replace(choice, is_diverted=is_diverted)
        if choice.name is None and owner is not None:
            self._bound_for[owner] += 1
        if choice.name is None and request.slots > 1 and not held:
            self._keep(instances, request, owner)
        return choice

    def weight(self, name: str) -> float:
        return self._weights[name].value

    def _is_on_trial(self, request: ProxyRequest, hint: CacheHint) -> bool:
        """Return whether a conversation is part of the trial: where it is, or by its beginning."""
        if not self._trial_share:
            return False
        for instance in self._instances:
            if instance.upstream.name == hint.owner:
                return instance.upstream.is_on_trial
        return is_in_share(self._trial_share, request)

    def _keep(
        self, instances: Sequence[Instance], request: ProxyRequest, owner: str | None
    ) -> None:
        """Keep slots for a request that needs several: those behind it would take each free one.

        Of its owner, or of the instance that lacks the fewest.
        """
        if instances:
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
            conversations=self._conversations.get(upstream.name, 0),
            cached_tokens=hint.cached_tokens.get(upstream.name, 0),
            backlog_tokens=instance.backlog_tokens,
            prefill_tps=instance.rates.prefill_tps,
            decode_s=self._decode_s / weight,
            free_in_s=turns * self._held_s / (upstream.slots * weight),
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
