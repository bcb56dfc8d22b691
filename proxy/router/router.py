"""Which instance answers which request: admitted, withdrawn, waited for, leased, idle, closed.

A lease is the right to use one slot of one instance for one request; an instance has as many as it
has slots, so no request ever waits inside an engine. A request that finds no free slot waits in the
queue of its model, and so does one that finds no instance, while the loader starts one. A withdrawn
instance gets no new leases and keeps those it has.

All changes happen in methods without `await`, most of them in `proxy.router.model_queue`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Final, Protocol

from proxy.access_log import Emit, discard
from proxy.errors import (
    CrashesEngine,
    NotLoaded,
    UpstreamConnectFailed,
    UpstreamCrashed,
    UpstreamFailed,
    UpstreamShutDown,
)
from proxy.models import ModelLoader
from proxy.prompt_cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.slot_map import TrackedSlot
from proxy.request import ProxyRequest
from proxy.router.acquire import acquire_slot, ensure_serving
from proxy.router.background_lease import IsPreempted, background_lease
from proxy.router.instances import Activity, Instance, Instances, InstanceStats
from proxy.router.lease import Completion, Lease
from proxy.router.model_queue import ModelQueue, QueueStats, queued
from proxy.router.response_progress import Clock
from proxy.router.silence import IsThere, Silence, answers_health
from proxy.router.slot_release import CountBusySlots, SlotReleaser, slots_in_use
from proxy.router.slot_selection import select_slots
from proxy.router.suspects import Suspects
from proxy.settings import ProxySettings
from proxy.upstream.slots import SlotState
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """What clients have and want of a model at one moment, other machines aside.

    Attributes:
        waiting: Requests in its queue.
        working: Requests that its instances here hold.
        idle_since_s: When the last of them ended; minus infinity before the first.
        cached_tokens: Tokens of conversations that its slots are believed to hold.
    """

    waiting: int
    working: int
    idle_since_s: float
    cached_tokens: int


class RouterListener(Protocol):
    """Whoever runs the instances. None of these may fail or block."""

    def idle(self) -> None:
        """Called when a model holds no request any more."""

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None:
        """Called when an instance did not begin to answer a request."""

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        """Called when an engine still computes `cancel_timeout_s` after its request is over."""

    def restore_verified(self, name: str, id_slot: int, timings: Timings, /) -> None:
        """Called with the first response of a conversation in the slot that it was restored to."""


class NoListener:
    """Ignores all of it."""

    def idle(self) -> None: ...

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None: ...

    def overdue(self, upstream: Upstream, reason: str, /) -> None: ...

    def restore_verified(self, name: str, id_slot: int, timings: Timings, /) -> None: ...


NO_LISTENER: Final = NoListener()


class Router:
    """The instances, what each of them is doing, and which requests wait for them.

    Args:
        settings: The policy, and the longest queue.
        listener: Whoever runs the instances.
        emit: Takes `upstream.failed` where an engine does not free a slot.
        clock: Monotonic time.
        count: Asks an instance how many of its slots are in use; None for the usual way.
        is_there: Asks an instance whether it responds; None for the usual way.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        listener: RouterListener = NO_LISTENER,
        emit: Emit = discard,
        *,
        clock: Clock = time.monotonic,
        count: CountBusySlots | None = None,
        is_there: IsThere | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._emit = emit
        self._clock = clock
        self._instances = Instances()
        self._prefix_index = PrefixIndex(settings.prefix_index_max_blocks)
        self._suspects = Suspects(clock, settings.crash_memory_s)
        self._queues: dict[str, ModelQueue] = {}
        self._reclaim = SlotReleaser(
            count or slots_in_use(settings), clock, settings.cancel_timeout_s, self._report_overdue
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
        leases = {*instance.in_flight, *instance.ending} if instance else set()
        for lease in leases:
            lease.set_process_exit(is_crash=is_crash)
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

    def background_lease(self, name: str) -> AbstractAsyncContextManager[IsPreempted]:
        """Hold a slot for work of our own; the block gets a function that asks for it back.

        Raises:
            UpstreamShutDown: The instance is not in service, or was stopped.
            ProxyError: No slot was free in five seconds.
        """
        return background_lease(self, name)

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
        self, request: ProxyRequest, avoid: Collection[str] = (), loader: ModelLoader | None = None
    ) -> AsyncIterator[Lease]:
        """Hold one slot of an instance for the length of the block, after a wait if need be.

        The request is to be sent at once, to `lease.upstream` and with `lease.id_slot`. One that
        needs no slot takes none, and waits in no queue. The slot is free again at once with
        `finish`; else once the engine has confirmed that it is idle.

        Args:
            request: The request; it waits no longer than its queue timeout.
            avoid: Names of instances to take only if there is no other.
            loader: Loads models; without one, a model without an instance is unavailable.

        Raises:
            QueueFull: Too many requests wait already.
            QueueTimeout: No slot became free in time.
            ModelLoading: No instance was ready in time.
            CrashesEngine: Engines crashed while they computed it.
            NotLoaded: No instance is ready, and the request loads none.
            Unavailable: No instance is ready, and none will be; or the loader's own errors.
            UpstreamShutDown: `close` ended the block.
            UpstreamSilent: The instance does not respond; another has a slot free.
            UpstreamCrashed: The engine crashed; in place of the error that the block raised.
        """
        self._suspects.check(request)
        lease = await self._acquire(request, avoid, loader)
        try:
            self._suspects.check(request)  # another like it may have crashed while it waited
            async with lease:
                self._silence.watch(lease)
                await select_slots(lease, self._prefix_index, self._settings)
                try:
                    yield lease
                except UpstreamFailed as error:
                    if await lease.wait_crash(error):
                        raise UpstreamCrashed(
                            f"{lease.upstream.name} crashed while computing this request, which is "
                            "not retried; see its log (`corral logs`)"
                        ) from error
                    raise
                self._suspects.clear(request)
        except (UpstreamConnectFailed, CrashesEngine) as error:
            self._release(lease)  # the engine does not compute it
            if isinstance(error, UpstreamConnectFailed):
                self._listener.connect_failed(lease.upstream, error)
            raise
        finally:
            self._end(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a lease whose response is complete, and learn from the response.

        Args:
            lease: The lease.
            completed: What the response reports; None where the request was refused.
        """
        prompt, instance = lease.request.prompt, lease.instance
        if completed:
            self._queue(lease.request.model).note_finished(lease)
            timings = completed.timings
            instance.rates = instance.rates.after(timings) if timings else instance.rates
            if prompt:
                self._prefix_index.record(
                    lease.upstream.name, prompt, lease.expected_cached, timings, completed.reply
                )
            if timings and prompt and lease.slot:
                self._record_slot(lease, lease.slot, timings)
        self._release(lease)

    async def _acquire(
        self, request: ProxyRequest, avoid: Collection[str], loader: ModelLoader | None
    ) -> Lease:
        queue = self._queue(request.model)
        if request.kind.takes_slot:
            return await acquire_slot(queue, queued(request, avoid, self._clock()), loader)
        if request.may_load:
            await ensure_serving(queue, request, loader)
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

    def _record_slot(self, lease: Lease, slot: TrackedSlot, timings: Timings) -> None:
        name, prompt = lease.upstream.name, lease.request.prompt
        if lease.verifies_restore:
            self._listener.restore_verified(name, slot.id_slot, timings)
        if lease.conversation and prompt:
            held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
            slot_map = self._prefix_index.slot_map(name)
            slot_map.release(lease, self._clock())
            slot_map.set_conversation(slot, lease.conversation, held, prompt.blocks)

    def _release(self, lease: Lease) -> None:
        queue = self._queue(lease.request.model)
        for one in lease.slots:
            queue.release(one)

    def _end(self, lease: Lease) -> None:
        instance, queue = lease.instance, self._queue(lease.request.model)
        self._silence.forget(lease)
        instance.bytes_received += lease.progress.bytes_received
        for one in lease.slots:
            if one in instance.leases:
                self._reclaim.release_when_idle(one, queue.release)
        self._instances.discard_if_unused(instance)

    def _queue(self, model: str) -> ModelQueue:
        if model not in self._queues:
            self._queues[model] = ModelQueue(
                model,
                self._instances,
                self._prefix_index,
                self._settings,
                self._clock,
                self._listener.idle,
            )
        return self._queues[model]

    def _settle(self, model: str) -> None:
        self._queue(model).assign_slots()

    def _report_overdue(self, lease: Lease) -> None:
        limit_s = self._settings.cancel_timeout_s
        reason = f"still computes for a request that ended {limit_s:g} s ago"
        self._emit(
            "upstream.failed",
            request=lease.request.request_id,
            model=lease.request.model,
            instance=lease.upstream.name,
            phase="end",
            error=f"{lease.upstream.name} {reason}",
        )
        self._listener.overdue(lease.upstream, reason)


def _calm(instance: Instance) -> tuple[bool, float, int]:
    """Return whether an instance is spare, how busy it is, and when it was last asked."""
    node = instance.upstream.node
    return (
        bool(node and node.is_spare),
        len(instance.in_flight) / instance.upstream.slots,
        instance.last_used,
    )
