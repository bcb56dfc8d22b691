"""The work of a model's instances as the estimate of a first token needs it. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.estimate.measures import ModelMeasures
from proxy.estimate.prompt_tokens import PromptLength
from proxy.estimate.work import EngineWork, ModelWork, RunningRequest, WaitingRequest
from proxy.prompt_cache.cache_hint import CacheHint
from proxy.prompt_cache.conversations import Conversation
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.prompt import Prompt
from proxy.request import ProxyRequest
from proxy.router.finished import learn, limit_of
from proxy.router.instance_registry import Instances
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.router.queued_request import QueuedRequest, queued
from proxy.router.request_queue import RequestQueue
from proxy.router.response_progress import Clock
from proxy.router.slot_assignment import SlotAssignment
from proxy.router.weights import EQUAL

# Of many instances, those that would be considered first.
_INSTANCES_MAX: Final = 8
_READ_MAX: Final = 32
_BEHIND_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class EstimatedWork:
    """The work with the estimated request in it.

    Attributes:
        request: That one.
        lengths: What each instance is believed to hold of its prompt, by name.
    """

    work: ModelWork
    request: WaitingRequest
    lengths: Mapping[str, PromptLength]


class WorkReader:
    def __init__(
        self,
        queue: RequestQueue,
        instances: Instances,
        prefix_index: PrefixIndex,
        assignment: SlotAssignment,
        measures: ModelMeasures,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._instances = instances
        self._prefix_index = prefix_index
        self._assignment = assignment
        self._measures = measures
        self._clock = clock

    def work(self, request: ProxyRequest, idle: Sequence[EngineWork]) -> EstimatedWork:
        """Return the work with a request that has not come; `idle` are engines yet to be loaded."""
        now_s = self._clock()
        for one in self._instances.of(self._queue.model).in_service:
            self.learn(one)
        new = queued(request, (), now_s)
        new.new_tokens = self._assignment.turns.new_tokens(new)
        order = self._assignment.turns.order(self._queue.order_with(new, now_s))
        entries = list(order)
        place = entries.index(new)
        instances = self._considered(request)
        lengths = self._lengths(new, instances)
        known = [self._waiting(one, instances) for one in entries[:_READ_MAX]]
        # Those far behind are as those before them; what comes after the request matters little.
        waiting = [known[at % len(known)] for at in range(place)]
        waiting.append(self._waiting(new, instances))
        waiting += known[place + 1 : place + 1 + _BEHIND_MAX]
        engines = tuple(self._engine(one) for one in instances) or tuple(idle)
        if request.prompt and not instances:
            lengths = {one.name: PromptLength(request.prompt.tokens) for one in idle}
        return EstimatedWork(ModelWork(engines, tuple(waiting), place), waiting[place], lengths)

    def learn(self, instance: Instance) -> None:
        """Learn from the requests of an instance that ended since the last time."""
        weights = self._instances.of(self._queue.model).weights
        learn(self._measures, instance, weights.get(instance.upstream.name, EQUAL).value)

    def _considered(self, request: ProxyRequest) -> list[Instance]:
        found = [
            one for one in self._instances.of(self._queue.model).answering if one.may_take(request)
        ]
        if len(found) <= _INSTANCES_MAX:
            return found
        hint = self._prefix_index.look_up(request.prompt, None)
        return sorted(
            found, key=lambda one: (-hint.cached_tokens(one.bit), one.is_spare, -one.free)
        )[:_INSTANCES_MAX]

    def _engine(self, instance: Instance) -> EngineWork:
        upstream = instance.upstream
        weights = self._instances.of(upstream.model).weights
        idle = self._prefix_index.slot_map(upstream.name).idle_slots
        tracked = {lease.slot.id_slot for lease in instance.leases if lease.slot}
        unknown = iter([one for one in range(upstream.slots) if one not in tracked])
        running = tuple(
            self._running(one, one.slot.id_slot if one.slot else next(unknown, upstream.slots))
            for one in instance.leases
        )
        used = {one.slot for one in running}
        free = [one for one in idle if one not in used]
        free += [one for one in range(upstream.slots) if one not in used and one not in free]
        return EngineWork(
            upstream.name,
            upstream.batch_tokens,
            running,
            tuple(free[: instance.free]),
            weights.get(upstream.name, EQUAL).value,
        )

    def _running(self, lease: Lease, slot: int) -> RunningRequest:
        if lease.is_ending:
            return RunningRequest(slot, 0, 0, 1.0)
        progress, limit = lease.progress, limit_of(lease.request)
        answer_tokens = self._measures.lengths.expected(limit, progress.decoded)
        if progress.first_token_at_s is not None:
            depth = progress.prompt_total + progress.decoded
            return RunningRequest(slot, 0, depth, answer_tokens)
        total, done = progress.prompt_total, progress.prompt_done
        if not done:  # the engine has reported nothing yet
            length = PromptLength(total, min(total, lease.expected_cached))
            total = self._measures.tokens.whole(length)
            done = total - self._measures.tokens.new(length)
        return RunningRequest(slot, max(1, total - done), done, answer_tokens)

    def _waiting(self, entry: QueuedRequest, instances: Sequence[Instance]) -> WaitingRequest:
        prompt, tokens = entry.request.prompt, self._measures.tokens
        whole = PromptLength(prompt.tokens if prompt else 1)
        lengths = self._lengths(entry, instances)
        return WaitingRequest(
            tokens.whole(whole),
            self._measures.lengths.expected(limit_of(entry.request)),
            tokens.new(whole),
            {name: tokens.new(one) for name, one in lengths.items() if one.cached},
            entry.awaited.upstream.name if entry.awaited else None,
            self._slots(entry, instances),
        )

    def _lengths(
        self, entry: QueuedRequest, instances: Iterable[Instance]
    ) -> dict[str, PromptLength]:
        """Return what each instance is believed to hold of a prompt."""
        if (prompt := entry.request.prompt) is None:
            return {}
        hint = self._prefix_index.look_up(prompt, entry.session)
        held = self._prefix_index.held_tokens(prompt)
        return {
            one.upstream.name: PromptLength(prompt.tokens, self._cached(prompt, hint, held, one))
            for one in instances
        }

    def _cached(
        self, prompt: Prompt, hint: CacheHint, held: Iterable[tuple[int, int]], instance: Instance
    ) -> int:
        cached = max((tokens for tokens, holders in held if holders & instance.bit), default=0)
        if instance.upstream.node:
            cached = max(cached, hint.cached_tokens(instance.bit))
        if hint.conversation and self._slot(hint, instance) is not None:
            cached = max(cached, _continued(prompt, hint.conversation))
        return cached

    def _slots(self, entry: QueuedRequest, instances: Iterable[Instance]) -> dict[str, int]:
        hint = self._prefix_index.look_up(entry.request.prompt, entry.session)
        if hint.conversation is None:
            return {}
        slots = ((one.upstream.name, self._slot(hint, one)) for one in instances)
        return {name: slot for name, slot in slots if slot is not None}

    def _slot(self, hint: CacheHint, instance: Instance) -> int | None:
        """Return the slot of an instance that holds the conversation of a prompt."""
        if hint.conversation is None or not instance.upstream.can_name_slots:
            return None
        return self._prefix_index.slot_map(instance.upstream.name).slot_of(hint.conversation)


def _continued(prompt: Prompt, conversation: Conversation) -> int:
    """Return the tokens of a conversation that a prompt continues, its answers included."""
    known = set(conversation.turn_hashes)
    turns = [at for at, one in enumerate(prompt.turn_hashes) if one in known]
    return prompt.tokens_until(turns[-1]) if turns else 0
