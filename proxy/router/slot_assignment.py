"""Which of the requests that wait for a model gets a free slot, and which one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final

from proxy.prompt_cache.cache_hint import CacheHint
from proxy.prompt_cache.index import PrefixIndex
from proxy.router.candidates import Candidates
from proxy.router.instance_registry import Instances
from proxy.router.instances import Instance
from proxy.router.last_slot import LastSlot, is_last_slot
from proxy.router.lease import Lease
from proxy.router.lease_times import LeaseTimes
from proxy.router.many_candidates import ManyCandidates
from proxy.router.model_instances import ModelInstances
from proxy.router.prefix_turns import PrefixTurns
from proxy.router.prompt_turns import PromptTurns
from proxy.router.queued_request import QueuedRequest
from proxy.router.request_queue import RequestQueue
from proxy.router.response_progress import Clock

# Of more than so many, and among more instances, those that wait for their owners choose again when
# it has a slot free, or after so long: each choice takes longer than the wait of a few could save.
_FEW_WAIT: Final = 16
_FEW_INSTANCES: Final = 16
_LOOKS_AGAIN_S: Final = 0.25
_NONE: Final[Mapping[str, float]] = MappingProxyType({})


class SlotAssignment:
    """Assigns the slots of one model.

    Args:
        on_first_token: Called when a prompt is computed on which others may have waited.

    Attributes:
        recheck_in_s: After the latest `assign`, when the answer may be another one without an
            event; infinity: never.
    """

    def __init__(
        self,
        queue: RequestQueue,
        instances: Instances,
        prefix_index: PrefixIndex,
        clock: Clock,
        on_first_token: Callable[[], None],
    ) -> None:
        self.times = LeaseTimes()
        self.turns = PromptTurns(queue.model, instances, prefix_index)
        self._prefix_turns = PrefixTurns(prefix_index, self.times)
        self.last_slot = LastSlot()
        self.recheck_in_s = math.inf
        self._queue = queue
        self._instances = instances
        self._prefix_index = prefix_index
        self._clock = clock
        self._on_first_token = on_first_token
        self._turn = 0.0  # of the last instance that got a request, before it did

    def assign(self, entries: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Lease a free slot to the first request that takes one; return that request."""
        of_model, now_s = self._instances.of(self._queue.model), self._clock()
        instances = of_model.answering
        self.recheck_in_s = math.inf
        if not of_model.has_free_slot:
            return None
        candidates: Candidates | None = None
        for queued in entries:
            if owner := self._awaited_owner(queued, of_model, now_s):
                candidates = candidates or self._candidates(of_model)
                candidates.bind(owner)
                continue
            left = self._left(queued, of_model, now_s) if queued.priority == "batch" else _NONE
            if left is None:
                continue
            # At each decision: what the caches hold changes while a request waits.
            hint = self._prefix_index.look_up(queued.request.prompt, queued.session)
            held = self._held(queued, of_model, left, hint, now_s)
            if len(instances) == 1 and candidates is None and instances[0].can_take(queued.request):
                if not held:  # most models have one instance
                    self._lease(queued, instances[0], hint, now_s)
                    return queued
                self._recheck_after(None, held)
                continue
            candidates = candidates or self._candidates(of_model)
            waited_s = now_s - queued.joined_at_s
            choice = candidates.choice(queued.request, queued.avoid, hint, waited_s, held)
            if choice.name is not None:
                chosen = candidates.get(choice.name)
                self._lease(queued, chosen, hint, now_s).is_diverted = choice.is_diverted
                self._count_turn(chosen, candidates.weight(choice.name))
                return queued
            self._recheck_after(choice.moves_in_s, held)
            queued.awaited = candidates.find(hint.owner)
            queued.looks_again_at_s = now_s + min(choice.moves_in_s or 0.0, _LOOKS_AGAIN_S)
        return None

    def _awaited_owner(
        self, queued: QueuedRequest, of_model: ModelInstances, now_s: float
    ) -> Instance | None:
        """Return the owner for which a request waits that need not choose again yet."""
        owner, again_in_s = queued.awaited, queued.looks_again_at_s - now_s
        if owner is None or again_in_s <= 0:
            return None
        if len(self._queue) <= _FEW_WAIT and len(of_model.answering) <= _FEW_INSTANCES:
            return None
        if owner.has_free_slot or owner.is_silent or not owner.in_service:
            return None
        self.recheck_in_s = min(self.recheck_in_s, again_in_s)
        return owner

    def _left(
        self, queued: QueuedRequest, of_model: ModelInstances, now_s: float
    ) -> Mapping[str, float] | None:
        """Return the instances that a batch request leaves, and for how long; None: all of them."""
        # One whose turn it is while interactive requests wait takes any slot.
        left_s = 0.0 if self._queue.waiting("interactive") else self.last_slot.left_s(now_s)
        if left_s == 0:
            return _NONE
        self.recheck_in_s = min(self.recheck_in_s, left_s)
        if not is_last_slot(of_model, queued.request):
            return _NONE
        if not of_model.has_free_spare:
            return None
        return {one.upstream.name: left_s for one in of_model.own}

    def _held(
        self,
        queued: QueuedRequest,
        of_model: ModelInstances,
        left: Mapping[str, float],
        hint: CacheHint,
        now_s: float,
    ) -> Mapping[str, float]:
        """Return the instances that a request leaves, or where another prompt comes first.

        Or where what it begins with is being computed.
        """
        alike = of_model.with_files
        pure = of_model.pure and [one for one in of_model.pure if one in of_model.answering]
        if not (alike or pure) or self._queue.is_full(queued.priority):
            return left
        alike_waits = self._prefix_turns.waits(alike, queued, now_s)
        return {**left, **alike_waits, **self.turns.waits(pure, queued, hint, now_s)}

    def _recheck_after(self, moves_in_s: float | None, held: Mapping[str, float]) -> None:
        moves_in_s = math.inf if moves_in_s is None else moves_in_s
        self.recheck_in_s = min(self.recheck_in_s, moves_in_s, *held.values())

    def _candidates(self, of_model: ModelInstances) -> Candidates:
        owners, policy = self._prefix_index.owners(self._queue.model), self._queue.settings.policy
        trial_share = of_model.trial_share
        if sets := of_model.sets:
            return ManyCandidates(sets, owners, policy, self.times, trial_share)
        return Candidates(
            of_model.answering, owners, policy, of_model.weights, self.times, trial_share
        )

    def _lease(
        self, queued: QueuedRequest, instance: Instance, hint: CacheHint, now_s: float
    ) -> Lease:
        request, prompt = queued.request, queued.request.prompt
        on_first_token = self._on_first_token if instance.upstream.prefer_pure_decode else None
        lease = Lease(request, instance, self._clock, on_first_token=on_first_token)
        lease.queued_s = now_s - queued.joined_at_s
        lease.position = queued.position
        if prompt:
            lease.expected_cached = hint.held_tokens(instance.bit)
            lease.is_continued = hint.conversation is not None
            lease.has_awaited_owner = queued.awaited is not None
            conversation = self._prefix_index.assign(
                instance.upstream, prompt, queued.session, hint
            )
            lease.conversation, lease.conversation_number = conversation, conversation.number
        if request.slots > 1:
            lease.beside = tuple(
                Lease(request, instance, self._clock, first=lease)
                for _ in range(instance.needed(request) - 1)
            )
        instance.hold(lease.slots)
        lease.sequences = len(instance.leases)
        queued.lease = lease
        return lease

    def _count_turn(self, instance: Instance, weight: float) -> None:
        # One that was busy or new has missed turns, and does not get them all now.
        self._turn = max(self._turn, instance.turn)
        instance.set_turn(self._turn + 1 / weight)
