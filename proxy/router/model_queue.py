"""The instances and the line of one model: who gets which slot when. No I/O, no waiting.

Whatever may let somebody in (a slot that is free, an instance admitted, a request that joined)
ends in `settle`: as long as there is a free slot, those in line are asked in turn which one they
take. Who would rather wait for its home stays in its place and holds up nobody behind it; that it
would leave at some time is the one thing that happens without an event, and has a timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from proxy.errors import QueueFull
from proxy.prompt_cache.index import PrefixIndex
from proxy.request import ProxyRequest
from proxy.router.fair_queue import FairQueue
from proxy.router.instances import Instance, Instances
from proxy.router.lease import Clock, Lease
from proxy.router.queued_request import QueuedRequest, RoutingView
from proxy.settings import ProxySettings
from proxy.upstream.timings import Timings, average

# How long a request holds a slot, before any has been seen to.
_HELD_S: Final = 2.0
_RETRY_MAX_S: Final = 120
_ALARM_MIN_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class QueueStats:
    """What is known of a line at one moment.

    Attributes:
        interactive: Requests that wait in the first priority.
        batch: Requests that wait in the second.
        oldest_wait_s: How long the one that has waited longest has waited.
        expected_wait_s: How long one that joins now may expect to wait.
    """

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class ModelQueue:
    """One model's instances and line.

    Args:
        model: The id of the model.
        instances: All instances; those of other models are left alone.
        prefix_index: What is believed of their caches.
        settings: The policy, and how long the line may be.
        clock: Monotonic time.

    Attributes:
        model: As given.
        admissions: How many times an instance was admitted.
        is_paused: Whether all wait in line, even where a slot is free.
        ended_at_s: When an instance here last ended a request; minus infinity before the first.
        on_idle: Called when nobody waits and nothing is held here any more.
        on_restore_verified: As `Router.on_restore_verified`.
    """

    def __init__(
        self,
        model: str,
        instances: Instances,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        clock: Clock,
    ) -> None:
        self.admissions = 0
        self.model = model
        self.is_paused = False
        self.ended_at_s = -math.inf
        self.on_idle: Callable[[], None] = lambda: None
        self.on_restore_verified: Callable[[str, int, Timings], None] = lambda *_: None
        self._instances = instances
        self._prefix_index = prefix_index
        self._settings = settings
        self._clock = clock
        self._queue: FairQueue[QueuedRequest] = FairQueue()
        self._granted: dict[Lease, QueuedRequest] = {}
        self._mean_lease_s = _HELD_S
        self._recheck: asyncio.TimerHandle | None = None

    # Those who wait.

    def join(self, queued: QueuedRequest) -> None:
        """Give a request a slot, or else a place in line.

        Raises:
            QueueFull: There is neither.
        """
        if not len(self._queue) and self._assign_first((queued,)):
            return
        self._queue.join(queued)
        self.assign_slots()
        if queued.lease is not None:
            return
        queued.position = self._queue.position(queued, self._clock())
        if len(self._queue) > self._settings.queue_max and not queued.request.is_let_in:
            self._queue.leave(queued)
            ahead = f"{len(self._queue)} requests wait for {self.model} already"
            raise QueueFull(f"{ahead}; ask again later", self.retry_after_s)

    def remove(self, queued: QueuedRequest) -> None:
        """Give up a place, and a slot that was given but not used; else do nothing."""
        self._queue.leave(queued)
        if queued.lease in self._granted:
            for lease in queued.lease.slots:
                self.release(lease)
        elif queued.lease is None and queued.request.slots > 1:
            self.assign_slots()  # slots may have been kept for it

    def begin(self, queued: QueuedRequest) -> None:
        """Note that the slot that a request was given is used from now on."""
        if queued.lease:
            self._granted.pop(queued.lease, None)

    @property
    def retry_after_s(self) -> int:
        """Return after how many whole seconds it is worth to ask again, 1 to 120."""
        return min(max(1, math.ceil(self._expected_wait_s)), _RETRY_MAX_S)

    def stats(self) -> QueueStats:
        """Return what is known of the line."""
        has_room = any(
            instance.has_free_slot for instance in self._instances.in_service(self.model)
        )
        return QueueStats(
            self._queue.waiting("interactive"),
            self._queue.waiting("batch"),
            self._queue.oldest_wait_s(self._clock()),
            0.0 if has_room else self._expected_wait_s,
        )

    # The instances.

    def serves(self, request: ProxyRequest) -> bool:
        """Return whether an instance is admitted that may take a request."""
        return any(
            instance.may_take(request) for instance in self._instances.in_service(self.model)
        )

    def admitted(self) -> None:
        """Note that an instance was admitted."""
        self.admissions += 1
        self.assign_slots()

    def withdrawn(self, instance: Instance) -> None:
        """Note that an instance is withdrawn: who was promised a slot of it goes back in line."""
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
        """Take a slot back, and give it to the next; nothing where it is back already."""
        self._granted.pop(lease, None)
        if lease in lease.instance.leases:
            lease.instance.leases.remove(lease)
            if lease.slot:
                self._prefix_index.slot_map(lease.upstream.name).release(lease, self._clock())
            self._instances.discard_if_unused(lease.instance)
            if not (lease.upstream.node or lease.request.is_background):
                self.ended_at_s = self._clock()
            self.assign_slots()
            if not self.in_flight:
                self.on_idle()

    @property
    def in_flight(self) -> int:
        """Return how many clients' requests its instances here hold, those included that leave."""
        here = (instance for instance in self._instances if not instance.upstream.node)
        leases = (instance.leases for instance in here if instance.upstream.model == self.model)
        return sum(not lease.request.is_background for held in leases for lease in held)

    def record_result(self, lease: Lease, timings: Timings | None, mark: int | None) -> None:
        """Take in what came of a request, and by what its next turn will be known."""
        prompt, name = lease.request.prompt, lease.upstream.name
        self._mean_lease_s = average(self._mean_lease_s, self._clock() - lease.began_at_s)
        if timings:
            lease.instance.rates = lease.instance.rates.after(timings)
        if timings and prompt:
            self._prefix_index.record_hit(name, lease.expected_cached, timings.cached_tokens)
            self._prefix_index.add_prefix(name, prompt.blocks)
            if lease.slot and lease.verifies_restore:
                self.on_restore_verified(name, lease.slot.id_slot, timings)
            if lease.slot and lease.conversation:
                held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
                self._prefix_index.slot_map(name).set_conversation(
                    lease.slot, lease.conversation, held, prompt.blocks
                )
        if mark is not None and prompt:
            self._prefix_index.record_reply(prompt, mark)

    # Who is next.

    def assign_slots(self) -> None:
        """Give free slots to those in line, as long as there are both."""
        if self._recheck:
            self._recheck.cancel()
            self._recheck = None
        while len(self._queue) and (queued := self._assign_first(self._queue.order(self._clock()))):
            self._queue.take(queued)

    def _assign_first(self, entries: Iterable[QueuedRequest]) -> QueuedRequest | None:
        """Give a free slot to the first of those who take one; return who that was."""
        instances, now_s = self._instances.answering(self.model), self._clock()
        view = RoutingView(
            instances,
            self._prefix_index,
            self._settings.policy,
            held_s=self._mean_lease_s,
            now_s=now_s,
        )
        if self.is_paused or not view.has_room:
            return None
        soonest_s = math.inf
        for queued in entries:
            choice = view.choice(queued)
            if choice.name is not None:
                self._grant(
                    queued, next(s for s in instances if s.upstream.name == choice.name), now_s
                )
                return queued
            if choice.moves_in_s is not None:
                soonest_s = min(soonest_s, choice.moves_in_s)
        self._schedule_recheck(soonest_s)
        return None

    def _grant(self, queued: QueuedRequest, instance: Instance, now_s: float) -> None:
        prompt = queued.request.prompt
        lease = Lease(queued.request, instance, self._clock, self)
        lease.queued_s = now_s - queued.joined_at_s
        lease.position = queued.position
        lease.expected_cached = self._prefix_index.cached_tokens(instance.upstream.name, prompt)
        if prompt:
            lease.conversation = self._prefix_index.assign(
                instance.upstream, prompt, queued.session
            )
        lease.beside = tuple(
            Lease(queued.request, instance, self._clock, self, first=lease)
            for _ in range(instance.needed(queued.request) - 1)
        )
        self._instances.mark_used(instance)
        instance.leases += lease.slots
        self._granted[lease] = queued
        queued.lease = lease
        queued.wake.set()

    def _schedule_recheck(self, in_s: float) -> None:
        if in_s < math.inf:
            loop = asyncio.get_running_loop()
            self._recheck = loop.call_later(max(in_s, _ALARM_MIN_S), self.assign_slots)

    @property
    def _expected_wait_s(self) -> float:
        slots = sum(instance.upstream.slots for instance in self._instances.in_service(self.model))
        return self._mean_lease_s * (len(self._queue) + 1) / max(1, slots)
