"""Reads the work of a model's instances for estimates of a first token. Changes no requests.

The measurements of a finished request are kept when it ends, and learned with the next estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from proxy.cache.index import CacheHint
from proxy.request.request import ProxyRequest
from proxy.router.forecast import EngineWork, ModelWork, RunningRequest, WaitingRequest
from proxy.router.lease import EQUAL, Lease, RoutingTarget
from proxy.router.measures import ModelMeasures, PromptLength, Span
from proxy.router.queue import QueuedRequest, SlotAssignment, queue_entry


def _span_so_far(lease: Lease) -> Span | None:
    """Return the known part of a running request; None if its prompt has not begun."""
    progress, now_s = lease.progress, lease.clock()
    if lease.is_ending or not progress.prompt_done:
        return None
    computed = progress.prompt_done - progress.cached
    first_s = progress.first_token_at_s or now_s
    return Span(lease.began_at_s, first_s, now_s, computed, progress.cached, progress.decoded)


# Bounds of an estimate: instances, waiting requests that are read, and those behind the request.
_INSTANCES_MAX: Final = 8
_READ_MAX: Final = 32
_BEHIND_MAX: Final = 8


# The work with the estimated request in it, and its prompt's length for each instance, by name.
EstimatedWork = tuple[ModelWork, Mapping[str, PromptLength]]
# Returns the work before a request that got this instance, with so many tokens expected cached.
EarlierWork = Callable[[str, int], EstimatedWork]


class WorkReader:
    """Reads the work of one model's instances."""

    def __init__(self, assignment: SlotAssignment, measures: ModelMeasures) -> None:
        self._assignment, self._measures = assignment, measures
        self._queue, self._instances = assignment.queue, assignment.instances
        self._prefix_index, self._clock = assignment.prefix_index, assignment.clock

    def work(self, request: ProxyRequest, idle: Sequence[EngineWork]) -> EstimatedWork:
        """Return the work if a request came now; `idle` are engines that would be loaded."""
        now_s = self._clock()
        self.learn_all()
        new = queue_entry(request, (), now_s)
        new.new_tokens = self._assignment.new_tokens(new)
        order = self._assignment.order(self._queue.order_with(new, now_s))
        entries = list(order)
        place = entries.index(new)
        instances = self._instances_considered(request)
        known = [self._waiting(entry, instances)[0] for entry in entries[:_READ_MAX]]
        estimated, lengths = self._waiting(new, instances)
        # Far requests are assumed to equal those before them; those behind this one matter little.
        waiting = [known[at % len(known)] for at in range(place)]
        waiting.append(estimated)
        waiting += known[place + 1 : place + 1 + _BEHIND_MAX]
        engines = tuple(self._engine(instance) for instance in instances) or tuple(idle)
        if request.prompt and not instances:
            lengths = {instance.name: PromptLength(request.prompt.tokens) for instance in idle}
        return ModelWork(engines, tuple(waiting), place), lengths

    def earlier_work(self, request: ProxyRequest) -> EarlierWork | None:
        """Note the running requests, to return the work now when this request has its answer.

        None if the request finds no free slot, or if there are too many instances.
        """
        of_model = self._instances.of_model(self._queue.model)
        instances = of_model.answering
        if self._queue.count or not of_model.has_free_slot or len(instances) > _INSTANCES_MAX:
            return None
        busy = tuple(self._engine(instance) for instance in instances if instance.leases)
        prompt_tokens = request.prompt.tokens if request.prompt else 1

        def work(name: str, cached: int) -> EstimatedWork:
            engines, chosen = busy, self._instances.get(name)
            if chosen and all(engine.name != name for engine in busy):
                weight = of_model.weights.get(name, EQUAL).value
                engine = EngineWork(name, chosen.upstream.batch_tokens, (), (0,), weight)
                engines = (*busy, engine)
            length = PromptLength(prompt_tokens, min(cached, prompt_tokens))
            tokens = self._measures.tokens
            waiting = WaitingRequest(tokens.whole(length), 1.0, tokens.new(length), instance=name)
            return ModelWork(engines, (waiting,), 0), {name: length}

        return work

    def learn_all(self) -> None:
        for instance in self._instances.of_model(self._queue.model).in_service:
            self.learn(instance)

    def learn(self, instance: RoutingTarget) -> None:
        if not instance.unlearned:
            return
        new, instance.unlearned = list(instance.finished)[-instance.unlearned :], 0
        spans = [span for span, *_ in instance.finished]
        spans += [span for span in map(_span_so_far, instance.leases) if span]
        weights = self._instances.of_model(self._queue.model).weights
        weight = weights.get(instance.upstream.name, EQUAL).value
        for finished in new:
            others = (span for span in spans if span is not finished[0])
            self._measures.note(finished, others, weight, instance.upstream.batch_tokens)

    def _instances_considered(self, request: ProxyRequest) -> list[RoutingTarget]:
        found = [
            instance
            for instance in self._instances.of_model(self._queue.model).answering
            if instance.may_take(request)
        ]
        if len(found) <= _INSTANCES_MAX:
            return found
        hint = self._prefix_index.look_up(request.prompt, None)
        found.sort(key=lambda instance: (instance.is_spare, -instance.free))
        found.sort(key=lambda instance: -hint.cached_tokens(instance.bit))
        return found[:_INSTANCES_MAX]

    def _engine(self, instance: RoutingTarget) -> EngineWork:
        upstream = instance.upstream
        weights = self._instances.of_model(upstream.model).weights
        tracked = {lease.slot.id_slot for lease in instance.leases if lease.slot}
        unknown = iter([id_slot for id_slot in range(upstream.slots) if id_slot not in tracked])
        slots = (
            lease.slot.id_slot if lease.slot else next(unknown, upstream.slots)
            for lease in instance.leases
        )
        running = tuple(map(self._running, instance.leases, slots))
        used = {request.slot for request in running}
        idle = [slot.id_slot for slot in self._prefix_index.slot_maps[upstream.name].idle]
        in_order = dict.fromkeys((*idle, *range(upstream.slots)))
        free = [id_slot for id_slot in in_order if id_slot not in used][: instance.free]
        weight = weights.get(upstream.name, EQUAL).value
        return EngineWork(upstream.name, upstream.batch_tokens, running, tuple(free), weight)

    def _running(self, lease: Lease, slot: int) -> RunningRequest:
        if lease.is_ending:
            return RunningRequest(slot, 0, 0, 1.0)
        progress, limit = lease.progress, lease.request.answer_limit
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

    def _waiting(
        self, entry: QueuedRequest, instances: Iterable[RoutingTarget]
    ) -> tuple[WaitingRequest, Mapping[str, PromptLength]]:
        """Return a request, and the length of its prompt for each instance, by name."""
        prompt, tokens = entry.request.prompt, self._measures.tokens
        whole = PromptLength(prompt.tokens if prompt else 1)
        lengths: dict[str, PromptLength] = {}
        slots: dict[str, int] = {}  # Those that hold its conversation.
        if prompt:
            hint = self._prefix_index.look_up(prompt, entry.session)
            held = self._prefix_index.held_tokens(prompt)
            for instance in instances:
                name, slot = instance.upstream.name, self._slot(hint, instance)
                found = (tokens for tokens, holders in held if holders & instance.bit)
                cached = max(found, default=0)
                if instance.upstream.node:
                    cached = max(cached, hint.cached_tokens(instance.bit))
                if hint.conversation and slot is not None:  # its answers are cached too
                    cached = max(cached, hint.conversation.known_tokens(prompt))
                lengths[name] = PromptLength(prompt.tokens, cached)
                if slot is not None:
                    slots[name] = slot
        waiting = WaitingRequest(
            tokens.whole(whole),
            self._measures.lengths.expected(entry.request.answer_limit),
            tokens.new(whole),
            {name: tokens.new(length) for name, length in lengths.items() if length.cached},
            entry.awaited.upstream.name if entry.awaited else None,
            slots,
        )
        return waiting, lengths

    def _slot(self, hint: CacheHint, instance: RoutingTarget) -> int | None:
        """Return the slot of an instance that holds the conversation of a prompt."""
        if hint.conversation is None or not instance.upstream.can_name_slots:
            return None
        slot = self._prefix_index.slot_maps[instance.upstream.name].find(hint.conversation)
        return slot.id_slot if slot and slot.is_idle else None
