"""Assigns the free slots of a model to waiting requests.

A request may be held back although a slot is free, for three reasons.

Prompts take turns on an instance that prefers pure decode (`PromptTurns`). An engine computes
prompts in the same passes in which it decodes, so every pass with prompt tokens makes all running
streams pause longer. Two prompts at once are no faster: the engine computes the second after the
first. So while sequences decode, one prompt begins after the other, the shortest first.

Two prompts with the same beginning, sent at once, would both compute all of it, in turns, and take
twice as long (`PrefixTurns`). So the second waits until the first is answered, if answers take less
time than the beginning; then an idle slot, the host cache or a file has it. The cost is a longer
wait if the answer takes longer than expected, at most twice as long.

A batch fills every idle slot, so each interactive request would wait for the end of an answer of
the batch (`LastSlot`). So for 30 s after an interactive request, batch requests leave one slot
free, if instances that are not spare have several.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Final, TypeVar

from proxy.cache.index import CacheHint, PrefixIndex
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, shared_blocks
from proxy.request.request import ProxyRequest
from proxy.router.candidates import Candidates, ManyCandidates
from proxy.router.lease import FEW_TOKENS, Clock, Lease, RoutingTarget
from proxy.router.queue import LeaseTimes, QueuedRequest, QueueEntry, RequestQueue
from proxy.router.registry import Instances, ModelInstances

# The longest wait for other prompts, unless half of the request's own timeout is shorter.
WAIT_MAX_S: Final = 10.0
_TIMEOUT_SHARE: Final = 0.5
# Turns that the longest prompt loses: this many shorter ones of each client overtake it.
_OVERTAKEN: Final = 4.0

P = TypeVar("P", bound=QueueEntry)


def prefill_wait_s(
    prefilling: int, decoding: int, new_tokens: int, waited_s: float, timeout_s: float
) -> float:
    """Return how long a prompt waits for others at most; 0 if it may begin.

    Args:
        prefilling: Prompts that the instance computes.
        decoding: Responses that it generates.
        new_tokens: Tokens of the prompt that it is expected to compute.
        waited_s: How long the request has waited.
        timeout_s: How long it may wait.
    """
    if new_tokens <= FEW_TOKENS or not (prefilling and decoding):
        return 0.0
    return max(0.0, min(WAIT_MAX_S, _TIMEOUT_SHARE * timeout_s) - waited_s)


def shortest_first(entries: Sequence[P], new_tokens: Callable[[P], int]) -> list[P]:
    """Order waiting requests by their tokens to compute, without starving any.

    `entries` are in the order of the queue. Priorities keep their turns. A long prompt moves back
    by at most four of the queue's turns; newcomers get later turns, so it is served eventually.
    """
    most = max(map(new_tokens, entries), default=0) or 1

    def turn(entry: P) -> tuple[float, int]:
        return entry.tag + _OVERTAKEN * new_tokens(entry) / most, entry.number

    ordered = sorted(entries, key=turn)
    turns = {
        priority: iter([entry for entry in ordered if entry.priority == priority])
        for priority in {entry.priority for entry in entries}
    }
    return [next(turns[entry.priority]) for entry in entries]


class PromptTurns:
    def __init__(self, model: str, instances: Instances, prefix_index: PrefixIndex) -> None:
        self._model = model
        self._instances = instances
        self._prefix_index = prefix_index

    def order(self, entries: Iterable[QueuedRequest]) -> Iterable[QueuedRequest]:
        """Return waiting requests in the order in which their prompts would begin."""
        if not self._pure():
            return entries
        return shortest_first(tuple(entries), lambda queued: queued.new_tokens)

    def waits(
        self,
        instances: Sequence[RoutingTarget],
        queued: QueuedRequest,
        hint: CacheHint,
        now_s: float,
    ) -> dict[str, float]:
        """Return the instances on which another prompt comes first, each with the longest wait."""
        prompt = queued.request.prompt
        found: dict[str, float] = {}
        for instance in instances:
            if prompt:
                new_tokens = prompt.tokens - hint.cached_tokens(instance.bit)
                waited_s = now_s - queued.joined_at_s
                wait_s = prefill_wait_s(
                    instance.prefilling, instance.decoding, new_tokens, waited_s, queued.timeout_s
                )
                if wait_s:
                    found[instance.upstream.name] = wait_s
        return found

    def new_tokens(self, queued: QueuedRequest) -> int:
        """Return the tokens of a prompt to compute; 0 if nothing depends on them."""
        prompt, instances = queued.request.prompt, self._pure()
        if prompt is None or not instances:
            return 0
        hint = self._prefix_index.look_up(prompt, queued.session)
        return prompt.tokens - hint.cached_tokens(sum(instance.bit for instance in instances))

    def is_beside_free_slot(self) -> bool:
        """Return whether requests may wait although a slot is free."""
        return any(instance.has_free_slot for instance in self._pure())

    def _pure(self) -> Sequence[RoutingTarget]:
        return self._instances.of_model(self._model).pure


# A shorter common beginning is computed within a batch; waiting for it does not pay.
_BLOCKS_MIN: Final = 8
# The longest wait, relative to the expected time of the first request.
_PATIENCE: Final = 2.0


class PrefixTurns:
    """Turns of prompts with the same beginning, for one model.

    Its instances must restore slot files.
    """

    def __init__(self, prefix_index: PrefixIndex, times: LeaseTimes) -> None:
        self._prefix_index = prefix_index
        self._times = times

    def waits(
        self, instances: Iterable[RoutingTarget], queued: QueuedRequest, now_s: float
    ) -> dict[str, float]:
        """Return the instances on which to wait, each with the longest wait."""
        prompt = queued.request.prompt
        if prompt is None or len(prompt.blocks) < _BLOCKS_MIN:
            return {}
        found = (
            (instance, self._wait_s(instance, prompt, now_s))
            for instance in instances
            if instance.leases
        )
        return {instance.upstream.name: wait_s for instance, wait_s in found if wait_s > 0}

    def _wait_s(self, instance: RoutingTarget, prompt: Prompt, now_s: float) -> float:
        """Return how long a wait pays; 0 or less: it does not."""
        begun = (
            (shared_blocks(other.blocks, prompt.blocks), lease)
            for lease in instance.leases
            if not lease.is_ending and (other := lease.request.prompt)
        )
        shared, first = max(begun, key=itemgetter(0), default=(0, None))
        if first is None or shared < _BLOCKS_MIN:
            return 0.0
        more = shared - self._prefix_index.available_blocks(instance.upstream, prompt)
        gain_s = more * BLOCK_TOKENS / instance.rates.prefill_tps
        if more < _BLOCKS_MIN or self._times.decode_s > gain_s:
            return 0.0
        prompts = instance.prefilling + 1
        expected_s = prompts * prompt.tokens / instance.rates.prefill_tps + self._times.decode_s
        return _PATIENCE * expected_s - (now_s - first.began_at_s)


_LEFT_S: Final = 30.0


class LastSlot:
    """How long batch requests leave one slot free."""

    def __init__(self) -> None:
        self._ended_at_s = -math.inf

    def note_ended(self, request: ProxyRequest, now_s: float) -> None:
        if request.priority == "interactive":
            self._ended_at_s = now_s

    def left_s(self, now_s: float) -> float:
        """Return the remaining time in which the slot is left free; 0: it is not."""
        return max(0.0, self._ended_at_s + _LEFT_S - now_s)


def is_last_slot(of_model: ModelInstances, request: ProxyRequest) -> bool:
    """Return whether a request would take the last free slot that is not spare."""
    return of_model.own_free <= min(request.slots, of_model.own_slots - 1)


# With more waiting requests or instances, a request that waits for its owner chooses again only
# when the owner has a free slot, or after `_LOOKS_AGAIN_S`: choices would cost more than they save.
_FEW_WAIT: Final = 16
_FEW_INSTANCES: Final = 16
_LOOKS_AGAIN_S: Final = 0.25
_NONE: Final[Mapping[str, float]] = MappingProxyType({})


class SlotAssignment:
    """Assigns the slots of one model.

    Args:
        on_first_token: Called when a prompt is computed for which others may have waited.

    Attributes:
        recheck_in_s: Time after the latest `assign` at which its result may change without an
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
        of_model, now_s = self._instances.of_model(self._queue.model), self._clock()
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
            is_batch = queued.priority == "batch"
            left = self._instances_to_leave(queued, of_model, now_s) if is_batch else _NONE
            if left is None:
                continue
            # For each decision, because the caches change while a request waits.
            hint = self._prefix_index.look_up(queued.request.prompt, queued.session)
            held = self._held_instances(queued, of_model, left, hint, now_s)
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
    ) -> RoutingTarget | None:
        """Return the owner for which a request waits, if it need not choose again yet."""
        owner, again_in_s = queued.awaited, queued.looks_again_at_s - now_s
        if owner is None or again_in_s <= 0:
            return None
        if len(self._queue) <= _FEW_WAIT and len(of_model.answering) <= _FEW_INSTANCES:
            return None
        if owner.has_free_slot or owner.is_silent or not owner.in_service:
            return None
        self.recheck_in_s = min(self.recheck_in_s, again_in_s)
        return owner

    def _instances_to_leave(
        self, queued: QueuedRequest, of_model: ModelInstances, now_s: float
    ) -> Mapping[str, float] | None:
        """Return the instances that a batch request must leave, and how long; None: all.

        A batch request that is served while interactive requests wait may take any slot.
        """
        left_s = 0.0 if self._queue.waiting("interactive") else self.last_slot.left_s(now_s)
        if left_s == 0:
            return _NONE
        self.recheck_in_s = min(self.recheck_in_s, left_s)
        if not is_last_slot(of_model, queued.request):
            return _NONE
        if not of_model.has_free_spare:
            return None
        return {instance.upstream.name: left_s for instance in of_model.own}

    def _held_instances(
        self,
        queued: QueuedRequest,
        of_model: ModelInstances,
        left: Mapping[str, float],
        hint: CacheHint,
        now_s: float,
    ) -> Mapping[str, float]:
        """Return the instances that a request may not take now, and how long.

        It must leave them, another prompt comes first, or they compute its beginning.
        """
        alike = of_model.with_files
        pure = of_model.pure and [
            instance for instance in of_model.pure if instance in of_model.answering
        ]
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
        self, queued: QueuedRequest, instance: RoutingTarget, hint: CacheHint, now_s: float
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
                for _ in range(instance.slots_needed(request) - 1)
            )
        instance.hold(lease.slots)
        lease.sequences = len(instance.leases)
        queued.lease = lease
        return lease

    def _count_turn(self, instance: RoutingTarget, weight: float) -> None:
        # One that was busy or new has missed turns, and does not get them all now.
        self._turn = max(self._turn, instance.turn)
        instance.set_turn(self._turn + 1 / weight)
