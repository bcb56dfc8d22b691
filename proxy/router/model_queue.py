"""The queue of one model: which request gets which slot when. No I/O, no waiting.

Whatever may let a request in ends in `assign_slots`: while a slot is free, the requests in the
queue choose in order. One that would rather wait for the owner of its conversation, or for another
prompt (`prefill_admission`), keeps its place and delays none behind it; the end of such a wait is
all that happens without an event, and has a timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.errors import QueueFull
from proxy.prompt_cache.index import CacheHint, PrefixIndex
from proxy.request import Priority, ProxyRequest
from proxy.router.candidates import Candidates
from proxy.router.fair_queue import FairQueue
from proxy.router.instances import Instance, Instances
from proxy.router.last_slot import LastSlot, with_free_slot
from proxy.router.lease import Lease
from proxy.router.policy import Choice
from proxy.router.prefill_admission import prefill_wait_s, shortest_first
from proxy.router.queued_request import QueuedRequest
from proxy.router.response_progress import Clock
from proxy.settings import ProxySettings
from proxy.upstream.timings import Timings, average

# How long a request holds a slot, before any has finished.
_HELD_S: Final = 2.0
_RETRY_MAX_S: Final = 120
_RECHECK_MIN_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Numbers of requests; `expected_wait_s` is that of one that joins now."""

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class ModelQueue:
    """One model's queue.

    Attributes:
        admissions: How many times an instance was admitted.
        is_paused: All requests wait, even where a slot is free.
        ended_at_s: When an instance here last ended a request; minus infinity before the first.
    """

    def __init__(
        self,
        model: str,
        instances: Instances,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        clock: Clock,
        on_idle: Callable[[], None],
    ) -> None:
        self.admissions = 0
        self.model = model
        self.is_paused = False
        self.ended_at_s = -math.inf
        self._on_idle = on_idle
        self._instances = instances
        self._prefix_index = prefix_index
        self._settings = settings
        self._clock = clock
        self._queue: FairQueue[QueuedRequest] = FairQueue()
        self._granted: dict[Lease, QueuedRequest] = {}
        self._mean_lease_s = _HELD_S
        self._mean_decode_s = 0.0
        self._last_slot = LastSlot()
        self._turn = 0.0  # of the last instance that got a request, before it did
        self._recheck: asyncio.TimerHandle | None = None

    # Requests that wait.

    def bypass(self, queued: QueuedRequest) -> Lease | None:
        """Lease a free slot to a request that finds an empty queue; None where it must wait."""
        if not len(self._queue) and self._assign_first((queued,)) and queued.lease:
            return self.begin(queued)
        return None

    def join(self, queued: QueuedRequest) -> None:
        """Put a request that found no slot into the queue; raises QueueFull."""
        queued.new_tokens = self._new_tokens(queued)
        self._queue.join(queued)
        self.assign_slots()
        if queued.lease is not None:
            return
        queued.position = self._queue.position(queued, self._clock())
        if self._is_full(queued.priority) and not queued.request.is_let_in:
            self._queue.leave(queued)
            ahead = f"{self._queue.waiting(queued.priority)} requests wait for {self.model} already"
            raise QueueFull(f"{ahead}; retry later", self.retry_after_s)

    def _is_full(self, priority: Priority) -> bool:
        """Return whether too many wait; batch requests fill no queue of interactive ones."""
        limits = self._settings
        most = limits.queue_max if priority == "interactive" else limits.batch.config.queue_size
        return self._queue.waiting(priority) > most

    def remove(self, queued: QueuedRequest) -> None:
        """Take a request out, with a slot that it was granted and does not use."""
        self._queue.leave(queued)
        if queued.lease in self._granted:
            for lease in queued.lease.slots:
                self.release(lease)
        elif queued.lease is None and queued.request.slots > 1:
            self.assign_slots()  # slots may have been kept for it

    def begin(self, queued: QueuedRequest) -> Lease:
        assert queued.lease is not None  # noqa: S101 (for the type: it waited for one)
        self._granted.pop(queued.lease, None)
        return queued.lease

    @property
    def held(self) -> int:
        """Requests that wait beside a free slot, for another prompt."""
        in_service = self._instances.in_service(self.model)
        has_room = any(one.upstream.prefer_pure_decode and one.has_free_slot for one in in_service)
        return len(self._queue) if has_room else 0

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a retry is worthwhile, 1 to 120."""
        return min(max(1, math.ceil(self._expected_wait_s)), _RETRY_MAX_S)

    def stats(self) -> QueueStats:
        has_room = any(
            instance.has_free_slot for instance in self._instances.in_service(self.model)
        )
        return QueueStats(
            self._queue.waiting("interactive"),
            self._queue.waiting("batch"),
            self._queue.oldest_wait_s(self._clock()),
            0.0 if has_room else self._expected_wait_s,
        )

    # Instances.

    def serves(self, request: ProxyRequest) -> bool:
        return any(
            instance.may_take(request) for instance in self._instances.in_service(self.model)
        )

    def admitted(self) -> None:
        self.admissions += 1
        self.assign_slots()

    def withdrawn(self, instance: Instance) -> None:
        """Put requests that were granted a slot of an instance back into the queue."""
        for lease in tuple(instance.leases):
            if queued := self._granted.pop(lease, None):
                for one in lease.slots:
                    instance.leases.remove(one)
                queued.lease = None
                queued.wake.clear()
                self._queue.join(queued)
            elif lease.is_ending:
                instance.leases.remove(lease)
        self._instances.discard_if_unused(instance)
        self.assign_slots()
        for queued in self._queue.order(self._clock()):
            if not self.serves(queued.request):
                queued.wake.set()

    def release(self, lease: Lease) -> None:
        """Free a slot and grant it to the next request; nothing where it is free already."""
        self._granted.pop(lease, None)
        if lease in lease.instance.leases:
            lease.instance.leases.remove(lease)
            if lease.slot:
                self._prefix_index.slot_map(lease.upstream.name).release(lease, self._clock())
            self._instances.discard_if_unused(lease.instance)
            if not (lease.upstream.node or lease.request.is_background):
                self.ended_at_s = self._clock()
            self._last_slot.note_ended(lease.request, self._clock())
            self.assign_slots()
            if not next(self._client_leases(), None):
                self._on_idle()

    @property
    def in_flight(self) -> int:
        """Clients' requests that instances here hold, withdrawn ones included."""
        return sum(1 for _ in self._client_leases())

    def _client_leases(self) -> Iterator[Lease]:
        for instance in self._instances:
            if not instance.upstream.node and instance.upstream.model == self.model:
                for lease in instance.leases:
                    if not lease.request.is_background:
                        yield lease

    def note_finished(self, lease: Lease, timings: Timings | None) -> None:
        instance, now_s = lease.instance, self._clock()
        self._mean_lease_s = average(self._mean_lease_s, now_s - lease.began_at_s)
        if timings:
            self._mean_decode_s = average(self._mean_decode_s, timings.decode_ms / 1000)
            sequences = (lease.sequences + len(instance.leases) + 1) // 2
            instance.rates = instance.rates.after(timings, sequences, now_s)

    # Granting slots.

    def assign_slots(self) -> None:
        """Grant free slots to waiting requests, as long as there are both."""
        if self._recheck:
            self._recheck.cancel()
            self._recheck = None
        while len(self._queue) and (queued := self._assign_first(self._order())):
            self._queue.take(queued)

    def _assign_first(self, entries: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Grant a free slot to the first request that takes one; return that request."""
        instances, now_s = self._instances.answering(self.model), self._clock()
        if self.is_paused or not any(instance.has_free_slot for instance in instances):
            return None
        names = [instance.upstream.name for instance in instances]
        candidates: Candidates | None = None
        soonest_s = math.inf
        # A batch request whose turn it is while interactive ones wait takes any slot.
        left_s = 0.0 if self._queue.waiting("interactive") else self._last_slot.left_s(now_s)
        for queued, left in with_free_slot(entries, instances, left_s):
            # At each decision: what the caches hold changes while a request waits.
            hint = self._prefix_index.look_up(names, queued.request.prompt, queued.session)
            held = left | self._held(instances, queued, hint, now_s)
            if len(instances) == 1 and candidates is None and instances[0].can_take(queued.request):
                choice = Choice(None if held else names[0])  # most models have one instance
            else:
                candidates = candidates or self._candidates(instances)
                waited_s = now_s - queued.joined_at_s
                choice = candidates.choice(queued.request, queued.avoid, hint, waited_s, held)
            if choice.name is not None:
                chosen = next(one for one in instances if one.upstream.name == choice.name)
                lease = self._grant(queued, chosen, hint, now_s)
                lease.is_diverted = choice.is_diverted
                if candidates:
                    self._count_turn(chosen, candidates.weight(choice.name))
                return queued
            if choice.moves_in_s is not None:
                soonest_s = min(soonest_s, choice.moves_in_s)
            soonest_s = min(soonest_s, *held.values(), math.inf)
        if left_s and self._queue.waiting("batch"):
            soonest_s = min(soonest_s, left_s)
        self._schedule_recheck(soonest_s)
        return None

    def _order(self) -> Iterable[QueuedRequest]:
        entries = self._queue.order(self._clock())
        if not self._pure_decode_names():
            return entries
        return shortest_first(tuple(entries), lambda queued: queued.new_tokens)

    def _held(
        self, instances: Sequence[Instance], queued: QueuedRequest, hint: CacheHint, now_s: float
    ) -> dict[str, float]:
        """Return the instances where another prompt comes first, and for how long at most."""
        prompt = queued.request.prompt
        if prompt is None or self._is_full(queued.priority):
            return {}
        waited_s, timeout_s = now_s - queued.joined_at_s, queued.timeout_s
        waits = {
            one.upstream.name: prefill_wait_s(
                one.work,
                prompt.tokens - hint.cached_tokens[one.upstream.name],
                waited_s,
                timeout_s,
            )
            for one in instances
            if one.upstream.prefer_pure_decode
        }
        return {name: wait_s for name, wait_s in waits.items() if wait_s}

    def _new_tokens(self, queued: QueuedRequest) -> int:
        """Return how many tokens of a prompt will be computed; 0 where nothing depends on it."""
        prompt, names = queued.request.prompt, self._pure_decode_names()
        if prompt is None or not names:
            return 0
        hint = self._prefix_index.look_up(names, prompt, queued.session)
        return prompt.tokens - max(hint.cached_tokens.values())

    def _pure_decode_names(self) -> list[str]:
        in_service = self._instances.in_service(self.model)
        return [one.upstream.name for one in in_service if one.upstream.prefer_pure_decode]

    def _candidates(self, instances: Sequence[Instance]) -> Candidates:
        conversations = self._prefix_index.conversations_per_instance(self.model)
        return Candidates(
            instances,
            conversations,
            self._settings.policy,
            self._instances.weights(self.model),
            self._mean_lease_s,
            self._mean_decode_s,
        )

    def _grant(
        self, queued: QueuedRequest, instance: Instance, hint: CacheHint, now_s: float
    ) -> Lease:
        prompt = queued.request.prompt
        on_first_token = self.assign_slots if instance.upstream.prefer_pure_decode else None
        lease = Lease(queued.request, instance, self._clock, on_first_token=on_first_token)
        lease.queued_s = now_s - queued.joined_at_s
        lease.position = queued.position
        if prompt:
            lease.expected_cached = hint.cached_tokens[instance.upstream.name]
            conversation = self._prefix_index.assign(
                instance.upstream, prompt, queued.session, hint
            )
            lease.conversation, lease.conversation_number = conversation, conversation.number
        lease.beside = tuple(
            Lease(queued.request, instance, self._clock, first=lease)
            for _ in range(instance.needed(queued.request) - 1)
        )
        instance.leases += lease.slots
        lease.sequences = len(instance.leases)
        self._granted[lease] = queued
        queued.lease = lease
        queued.wake.set()
        return lease

    def _count_turn(self, instance: Instance, weight: float) -> None:
        # One that was busy or new has missed turns, and does not get them all now.
        self._turn = max(self._turn, instance.turn)
        instance.turn = self._turn + 1 / weight

    def _schedule_recheck(self, in_s: float) -> None:
        if in_s < math.inf:
            loop = asyncio.get_running_loop()
            self._recheck = loop.call_later(max(in_s, _RECHECK_MIN_S), self.assign_slots)

    @property
    def _expected_wait_s(self) -> float:
        slots = sum(instance.upstream.slots for instance in self._instances.in_service(self.model))
        return self._mean_lease_s * (len(self._queue) + 1) / max(1, slots)
