"""The work of a model's instances as the estimate of a first token needs it. Changes nothing.

What a finished request tells estimates is kept when it ends, and learned when one is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from proxy.cache.conversations import Conversation
from proxy.cache.index import CacheHint, PrefixIndex
from proxy.cache.prompt import Prompt
from proxy.request.request import ProxyRequest
from proxy.router.assignment import SlotAssignment
from proxy.router.forecast import EngineWork, ModelWork, RunningRequest, WaitingRequest
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.router.measures import Finished, ModelMeasures, PromptLength, Span
from proxy.router.policy import EQUAL
from proxy.router.queue import QueuedRequest, RequestQueue, queued
from proxy.router.registry import Instances
from proxy.upstream.timings import Timings

# The limit of an answer in each API.
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens")


def note_finished(lease: Lease, timings: Timings, now_s: float) -> None:
    """Keep when a complete response was computed; nothing of one in chunks or without a token."""
    first_s = lease.progress.first_token_at_s
    if first_s is None or lease.chunked or lease.request.prompt is None:
        return
    decode_s, prompt_s = timings.decode_ms / 1000, timings.prompt_ms / 1000
    if decode_s + prompt_s <= now_s - lease.began_at_s:
        # Events that arrive together tell nothing of the time between them.
        first_s = min(first_s, now_s - decode_s)
    prompt_at_s = max(lease.began_at_s, first_s - prompt_s)
    span = Span(
        prompt_at_s,
        first_s,
        now_s,
        timings.prompt_tokens,
        timings.cached_tokens,
        timings.decoded_tokens,
    )
    overhead_s = prompt_at_s - lease.began_at_s if lease.sequences == 1 else None
    lease.instance.finished.add(Finished(span, limit_of(lease.request), overhead_s))


def with_times(timings: Timings, lease: Lease, now_s: float) -> Timings:
    """Add the times of our own clock to what an instance reports in tokens alone.

    Tokens that arrived together tell nothing of the time between them: such a response stays as
    it is.

    Source: llama-server, builds 10434 and 11434: `/v1/messages` has no `timings`.
    """
    first_s = lease.progress.first_token_at_s
    is_timed = timings.prompt_ms > 0 or timings.decode_ms > 0
    if is_timed or first_s is None or 2 * lease.progress.decoded < timings.decoded_tokens:
        return timings
    prompt_ms, decode_ms = 1000 * (first_s - lease.began_at_s), 1000 * (now_s - first_s)
    return replace(timings, prompt_ms=prompt_ms, decode_ms=decode_ms)


def learn(measures: ModelMeasures, instance: RoutingTarget, weight: float) -> None:
    """Learn from the requests of an instance that ended since the last time."""
    if not (new := instance.finished.take_unlearned()):
        return
    spans = [request.span for request in instance.finished.latest()]
    spans += [span for span in map(_span_so_far, instance.leases) if span]
    for finished in new:
        others = (span for span in spans if span is not finished.span)
        measures.note(finished, others, weight, instance.upstream.batch_tokens)


def limit_of(request: ProxyRequest) -> int | None:
    """Return the most tokens that an answer may have; None: the client sets no limit."""
    members = request.json
    for name in _LIMITS:
        if type(limit := members.get(name)) is int and limit > 0:
            return limit
    return None


def _span_so_far(lease: Lease) -> Span | None:
    """Return what is known of a request that is still computed."""
    progress, now_s = lease.progress, lease.clock()
    if lease.is_ending or not progress.prompt_done:
        return None
    computed = progress.prompt_done - progress.cached
    first_s = progress.first_token_at_s or now_s
    return Span(lease.began_at_s, first_s, now_s, computed, progress.cached, progress.decoded)


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
        for instance in self._instances.of(self._queue.model).in_service:
            self.learn(instance)
        new = queued(request, (), now_s)
        new.new_tokens = self._assignment.turns.new_tokens(new)
        order = self._assignment.turns.order(self._queue.order_with(new, now_s))
        entries = list(order)
        place = entries.index(new)
        instances = self._considered(request)
        lengths = self._lengths(new, instances)
        known = [self._waiting(entry, instances) for entry in entries[:_READ_MAX]]
        # Those far behind are as those before them; what comes after the request matters little.
        waiting = [known[at % len(known)] for at in range(place)]
        waiting.append(self._waiting(new, instances))
        waiting += known[place + 1 : place + 1 + _BEHIND_MAX]
        engines = tuple(self._engine(instance) for instance in instances) or tuple(idle)
        if request.prompt and not instances:
            lengths = {instance.name: PromptLength(request.prompt.tokens) for instance in idle}
        return EstimatedWork(ModelWork(engines, tuple(waiting), place), waiting[place], lengths)

    def learn(self, instance: RoutingTarget) -> None:
        """Learn from the requests of an instance that ended since the last time."""
        weights = self._instances.of(self._queue.model).weights
        learn(self._measures, instance, weights.get(instance.upstream.name, EQUAL).value)

    def _considered(self, request: ProxyRequest) -> list[RoutingTarget]:
        found = [
            instance
            for instance in self._instances.of(self._queue.model).answering
            if instance.may_take(request)
        ]
        if len(found) <= _INSTANCES_MAX:
            return found
        hint = self._prefix_index.look_up(request.prompt, None)
        return sorted(
            found,
            key=lambda instance: (
                -hint.cached_tokens(instance.bit),
                instance.is_spare,
                -instance.free,
            ),
        )[:_INSTANCES_MAX]

    def _engine(self, instance: RoutingTarget) -> EngineWork:
        upstream = instance.upstream
        weights = self._instances.of(upstream.model).weights
        idle = self._prefix_index.slot_map(upstream.name).idle_slots
        tracked = {lease.slot.id_slot for lease in instance.leases if lease.slot}
        unknown = iter([id_slot for id_slot in range(upstream.slots) if id_slot not in tracked])
        running = tuple(
            self._running(
                lease, lease.slot.id_slot if lease.slot else next(unknown, upstream.slots)
            )
            for lease in instance.leases
        )
        used = {request.slot for request in running}
        free = [id_slot for id_slot in idle if id_slot not in used]
        free += [
            id_slot
            for id_slot in range(upstream.slots)
            if id_slot not in used and id_slot not in free
        ]
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

    def _waiting(self, entry: QueuedRequest, instances: Sequence[RoutingTarget]) -> WaitingRequest:
        prompt, tokens = entry.request.prompt, self._measures.tokens
        whole = PromptLength(prompt.tokens if prompt else 1)
        lengths = self._lengths(entry, instances)
        return WaitingRequest(
            tokens.whole(whole),
            self._measures.lengths.expected(limit_of(entry.request)),
            tokens.new(whole),
            {name: tokens.new(length) for name, length in lengths.items() if length.cached},
            entry.awaited.upstream.name if entry.awaited else None,
            self._slots(entry, instances),
        )

    def _lengths(
        self, entry: QueuedRequest, instances: Iterable[RoutingTarget]
    ) -> dict[str, PromptLength]:
        """Return what each instance is believed to hold of a prompt."""
        if (prompt := entry.request.prompt) is None:
            return {}
        hint = self._prefix_index.look_up(prompt, entry.session)
        held = self._prefix_index.held_tokens(prompt)
        return {
            instance.upstream.name: PromptLength(
                prompt.tokens, self._cached(prompt, hint, held, instance)
            )
            for instance in instances
        }

    def _cached(
        self,
        prompt: Prompt,
        hint: CacheHint,
        held: Iterable[tuple[int, int]],
        instance: RoutingTarget,
    ) -> int:
        cached = max((tokens for tokens, holders in held if holders & instance.bit), default=0)
        if instance.upstream.node:
            cached = max(cached, hint.cached_tokens(instance.bit))
        if hint.conversation and self._slot(hint, instance) is not None:
            cached = max(cached, _continued_tokens(prompt, hint.conversation))
        return cached

    def _slots(self, entry: QueuedRequest, instances: Iterable[RoutingTarget]) -> dict[str, int]:
        hint = self._prefix_index.look_up(entry.request.prompt, entry.session)
        if hint.conversation is None:
            return {}
        slots = ((instance.upstream.name, self._slot(hint, instance)) for instance in instances)
        return {name: slot for name, slot in slots if slot is not None}

    def _slot(self, hint: CacheHint, instance: RoutingTarget) -> int | None:
        """Return the slot of an instance that holds the conversation of a prompt."""
        if hint.conversation is None or not instance.upstream.can_name_slots:
            return None
        return self._prefix_index.slot_map(instance.upstream.name).slot_of(hint.conversation)


def _continued_tokens(prompt: Prompt, conversation: Conversation) -> int:
    """Return the tokens of a conversation that a prompt continues, its answers included."""
    known = set(conversation.turn_hashes)
    turns = [at for at, turn_hash in enumerate(prompt.turn_hashes) if turn_hash in known]
    return prompt.tokens_until(turns[-1]) if turns else 0
