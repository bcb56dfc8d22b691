"""Which instance answers which request: admitted, withdrawn, waited for, leased, idle, closed.

A lease is the right to use one slot of one instance for one request; an instance has as many as it
has slots, so no request ever waits inside an engine. Who finds no slot free waits in the model's
line; who finds no instance at all waits there too, while the loader brings one up. An instance that
is withdrawn gets no new lease and keeps those it has. What comes from an instance is counted here
too, for whoever has to know whether it is alive.

All that changes, changes in methods without `await`, most of it in `proxy.router.model_queue`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.access_log import Emit
from proxy.errors import NotLoaded, UpstreamConnectFailed, UpstreamShutDown
from proxy.models import ModelLoader
from proxy.prompt_cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.prompt_cache.index import PrefixIndex
from proxy.request import ProxyRequest
from proxy.router.acquire import acquire_slot, ensure_serving
from proxy.router.computation import Computation
from proxy.router.in_flight import InFlightRequest
from proxy.router.instances import Activity, Instance, Instances, InstanceStats
from proxy.router.lease import Clock, Lease
from proxy.router.model_queue import ModelQueue, QueueStats
from proxy.router.queued_request import queued
from proxy.router.silence import IsThere, Silence, answers_health
from proxy.router.slot_release import CountBusySlots, SlotReleaser, slots_in_use
from proxy.router.slot_selection import SlotSelection
from proxy.router.suspects import Suspects
from proxy.settings import ProxySettings
from proxy.upstream.slots import SlotState, SlotTargeting
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What clients have and want of a model at one moment, other machines aside.

    Attributes:
        waiting: Requests in its line.
        working: Requests that its instances here hold.
        idle_since_s: When the last of them ended; minus infinity before the first.
        cached_tokens: Tokens of conversations that its slots are believed to hold.
    """

    waiting: int
    working: int
    idle_since_s: float
    cached_tokens: int


class Router:
    """The instances that may be asked, what each of them is doing, and who waits for them.

    Args:
        settings: The policy, and how long a line may be.
        clock: Monotonic time.
        count: Asks an instance how many of its slots are in use; None for the usual way.
        is_there: Asks an instance whether it is there; None for the usual way.

    Attributes:
        loader: Brings models up; without one, a model that is not up is unavailable.
        emit: Hears of slots that an engine does not give back.
        overdue: Called with an instance, and with what happened in a sentence, when its engine goes
            on computing for a request that is over longer than `cancel_timeout_s`.
        on_idle: Called when a model holds no request any more.
        on_connect_failed: Called when an instance did not begin to answer a request.
        on_restore_verified: Called with an instance, a slot that it began with, and what the prompt
            cost that went on there first.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        clock: Clock = time.monotonic,
        count: CountBusySlots | None = None,
        is_there: IsThere | None = None,
    ) -> None:
        self.loader: ModelLoader | None = None
        self.emit: Emit | None = None
        self.overdue: Callable[[Upstream, str], None] = lambda *_: None
        self.on_idle: Callable[[], None] = lambda: None
        self.on_connect_failed: Callable[[Upstream, UpstreamConnectFailed], None] = lambda *_: None
        self.on_restore_verified: Callable[[str, int, Timings], None] = lambda *_: None
        self._settings = settings
        self._clock = clock
        self._instances = Instances()
        self._prefix_index = PrefixIndex(settings.prefix_index_max_blocks)
        self._suspects = Suspects(clock, settings.crash_memory_s)
        self._queues: dict[str, ModelQueue] = {}
        self._reclaim = SlotReleaser(
            count or slots_in_use(settings), clock, settings.cancel_timeout_s, self._tell_overdue
        )
        self._silence = Silence(self._instances, is_there or answers_health(settings), self._settle)

    # What whoever runs the instances tells and asks.

    def admit(self, upstream: Upstream, filled: Iterable[RestoredSlot] = ()) -> None:
        """Let an instance be asked from now on; facts of an earlier admission are replaced.

        Args:
            upstream: The instance.
            filled: Its slots as its process began with them.
        """
        self._prefix_index.register(upstream, filled)
        self._instances.admit(upstream)
        self._queue(upstream.model).admitted()

    def withdraw(self, name: str) -> None:
        """Give an instance no more requests; those that it holds go on. Unknown names are fine."""
        if instance := self._instances.get(name):
            instance.in_service = False
            self._queue(instance.upstream.model).withdrawn(instance)

    def serves(self, model: str) -> bool:
        """Return whether an instance of the model may be asked now."""
        return bool(self._instances.in_service(model))

    def in_flight(self, name: str) -> int:
        """Return how many requests an instance holds; 0 where there is no such instance."""
        return self.activity(name).in_flight

    def activity(self, name: str) -> Activity:
        """Return what an instance does for us; nothing where there is no such instance."""
        instance = self._instances.get(name)
        return instance.activity if instance else Activity()

    def ended(self, name: str, *, is_crash: bool) -> int:
        """Hear that the process of an instance is gone; unknown names are fine.

        To be told of each process that was admitted with `tells_its_end`, before it is withdrawn.

        Args:
            name: The instance.
            is_crash: Whether a signal ended it that nobody here sent.

        Returns:
            How many requests of clients it computed, those included whose clients have left.
        """
        instance = self._instances.get(name)
        leases = {*instance.computed, *instance.ending} if instance else set()
        for lease in leases:
            lease.ending_of_process.tell(is_crash=is_crash)
        # One request may hold several slots.
        asks = {
            id(lease.request): lease.request for lease in leases if not lease.request.is_background
        }
        if is_crash:
            self._suspects.crashed(asks.values())
        return len(asks)

    async def wait_idle(self, name: str) -> None:
        """Wait until an instance holds no request. Without limit: `close` ends the wait."""
        if instance := self._instances.get(name):
            await instance.in_flight.wait_empty()

    async def close(self, name: str) -> None:
        """Withdraw an instance and cut what it holds; return when its connections are closed."""
        instance = self._instances.get(name)
        self.withdraw(name)
        if instance:
            instance.in_flight.abort(UpstreamShutDown(name))
            await instance.in_flight.wait_empty()

    def pause(self, model: str) -> None:
        """Have all requests for a model wait in line, even where a slot is free."""
        self._queue(model).is_paused = True

    def resume(self, model: str) -> None:
        """Let them go on. A model that is not held is fine."""
        queue = self._queue(model)
        queue.is_paused = False
        queue.assign_slots()

    def demand(self, model: str) -> ModelDemand:
        """Return what clients have and want of a model."""
        queue, facts = self._queue(model), self._queue(model).stats()
        cached = sum(
            self._prefix_index.slot_map(instance.upstream.name).tokens
            for instance in self._instances.in_service(model)
        )
        return ModelDemand(
            facts.interactive + facts.batch, queue.in_flight, queue.ended_at_s, cached
        )

    def conversation_fingerprints(
        self, name: str, page: Sequence[SlotState]
    ) -> Mapping[int, ConversationFingerprint]:
        """Return what tells the conversations in an instance's idle slots, as far as known.

        Args:
            name: The instance; unknown names are fine.
            page: Its slots, as it tells of them now.
        """
        return self._prefix_index.fingerprints(name, page, self._clock())

    async def run(self) -> None:
        """Look after slots of requests that were cut, and silent instances; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._silence.serve())
            await self._reclaim.run()

    # What is known.

    def instances(self) -> tuple[InstanceStats, ...]:
        """Return every instance that is admitted or holds something."""
        return tuple(
            instance.stats(
                self._prefix_index.conversations_per_instance(instance.upstream.model).get(
                    instance.upstream.name, 0
                )
            )
            for instance in self._instances
        )

    def queues(self) -> Mapping[str, QueueStats]:
        """Return the line of every model that was asked for."""
        return {model: queue.stats() for model, queue in self._queues.items()}

    # A request.

    @asynccontextmanager
    async def lease(
        self, request: ProxyRequest, avoid: Collection[str] = ()
    ) -> AsyncIterator[Lease]:
        """Hold one slot of an instance for the length of the block, after a wait if need be.

        What needs no slot takes none, and waits in no line. The slot is free again at once when
        the lease is complete; else once the engine has confirmed that it is idle.

        Args:
            request: The request; it waits no longer than its patience.
            avoid: Names of instances to take only if there is no other.

        Raises:
            QueueFull: Too many wait already.
            QueueTimeout: Its patience ended before its turn came.
            Loading: Its patience ended before an instance was up.
            CrashesEngine: It is refused, for engines crashed while they computed it.
            NotLoaded: No instance is up, and the request only looks.
            Unavailable: No instance is up, and none will be; so may the loader's own errors say.
            UpstreamShutDown: `close` cut the block.
            UpstreamSilent: The instance is not there; another has a slot free.
        """
        self._suspects.check(request)
        queue = self._queue(request.model)
        if request.kind.takes_slot:
            lease = await acquire_slot(queue, queued(request, avoid, self._clock()), self.loader)
        else:
            lease = await self._look(request, avoid)
        instance = lease.instance
        try:
            async with InFlightRequest(instance.in_flight) as in_flight:
                lease.attach(in_flight)
                self._silence.watch(lease)
                yield lease
        except UpstreamConnectFailed as error:
            for one in lease.slots:
                queue.release(one)
            self.on_connect_failed(lease.upstream, error)
            raise
        finally:
            self._silence.forget(lease)
            for one in lease.slots:
                if one in instance.leases:
                    self._reclaim.release_when_idle(one, queue.release)
            self._instances.discard_if_unused(instance)

    def answered(self, lease: Lease) -> None:
        """Note that the header of its answer is there."""
        self._silence.forget(lease)

    async def slot(self, lease: Lease, reach: SlotTargeting) -> int | None:
        """Return the slot that a request should name, or None for whichever the engine takes.

        To be asked once for each lease, right before the request goes out.

        Args:
            lease: Its lease.
            reach: How the request could come to a certain one.
        """
        upstream = lease.upstream
        is_followed = self._settings.policy == "affinity" and upstream.can_name_slots
        if not is_followed or not lease.request.kind.takes_slot:
            return None
        slot_map = self._prefix_index.slot_map(upstream.name)
        slot = await SlotSelection(lease, slot_map, self._settings, self._clock).select(reach)
        for one in lease.beside:
            if tracked := slot_map.reserve(one, None, self._clock()):
                one.slot = tracked
                slot_map.mark_sent(tracked)
        return slot

    def computation(self, lease: Lease) -> Computation:
        """Return what a request is to be sent in, and its answer read."""
        return Computation(lease, self._suspects)

    async def _look(self, request: ProxyRequest, avoid: Collection[str]) -> Lease:
        """Return the right to ask what takes no slot, of whoever is least busy."""
        queue = self._queue(request.model)
        if request.may_load:
            await ensure_serving(queue, request, self.loader)
        elif not queue.serves(request):
            raise NotLoaded(
                f"{request.model} is not loaded, and a GET does not load it; send a completion "
                f"request, or run `corral load {request.model}`"
            )
        instances = [
            instance
            for instance in self._instances.answering(request.model)
            if instance.may_take(request)
        ]
        fresh = [instance for instance in instances if instance.upstream.name not in avoid]
        return Lease(request, min(fresh or instances, key=_calm), self._clock)

    def _queue(self, model: str) -> ModelQueue:
        if model not in self._queues:
            self._queues[model] = ModelQueue(
                model, self._instances, self._prefix_index, self._settings, self._clock
            )
            self._queues[model].on_idle = self._idled
            self._queues[model].on_restore_verified = self._proved
        return self._queues[model]

    def _settle(self, model: str) -> None:
        self._queue(model).assign_slots()

    def _idled(self) -> None:
        self.on_idle()  # the listener may be set after the queue is made

    def _proved(self, name: str, slot: int, timings: Timings) -> None:
        self.on_restore_verified(name, slot, timings)

    def _tell_overdue(self, lease: Lease) -> None:
        limit_s = self._settings.cancel_timeout_s
        reason = f"still computes for a request that ended {limit_s:g} s ago"
        if self.emit:
            self.emit(
                "upstream.failed",
                request=lease.request.request_id,
                model=lease.request.model,
                instance=lease.upstream.name,
                phase="end",
                error=f"{lease.upstream.name} {reason}",
            )
        self.overdue(lease.upstream, reason)


def _calm(instance: Instance) -> tuple[bool, float, int]:
    """Return whether an instance is spare, how busy it is, and when it was last asked."""
    node = instance.upstream.node
    return (
        bool(node and node.is_spare),
        len(instance.in_flight) / instance.upstream.slots,
        instance.last_used,
    )
