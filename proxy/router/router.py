"""Which instance answers which request.

An instance has as many leases as slots, so no request waits inside an engine. A request that finds
no free slot, or no instance, waits in the queue of its model. A withdrawn instance gets no new
leases and keeps those it has. State changes only in methods without `await`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

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
from proxy.router.crash_suspects import CrashSuspects
from proxy.router.first_byte_monitor import FirstByteMonitor, Responds, answers_health
from proxy.router.instances import Activity, Instance, Instances, InstanceStats
from proxy.router.lease import Completion, Lease
from proxy.router.listener import NO_LISTENER, RouterListener
from proxy.router.model_queue import ModelQueue
from proxy.router.request_queue import QueueStats
from proxy.router.queued_request import queued
from proxy.router.response_progress import Clock
from proxy.router.slot_release import CountBusySlots, SlotReleaser, slots_in_use
from proxy.router.slot_selection import select_slots
from proxy.router.weights import EQUAL
from proxy.settings import ProxySettings
from proxy.upstream.slots import SlotState
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Clients' demand for a model on this machine.

    Attributes:
        working: Requests that its instances hold.
        idle_since_s: When the last of them ended; minus infinity before the first.
        cached_tokens: Tokens of conversations in its slots, as far as known.
        held: Those of the waiting that more slots would not help: another prompt comes first.
    """

    waiting: int
    working: int
    idle_since_s: float
    cached_tokens: int
    held: int = 0


class Router:
    """The instances, and the requests that they answer or that wait for them.

    Args:
        emit: Takes `upstream.failed` where an engine does not free a slot.
        count: Queries how many slots of an instance are in use; None for the usual way.
        responds: Queries whether an instance responds; None for the usual way.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        listener: RouterListener = NO_LISTENER,
        emit: Emit = discard,
        *,
        clock: Clock = time.monotonic,
        count: CountBusySlots | None = None,
        responds: Responds | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._emit = emit
        self._clock = clock
        self._instances = Instances(route_by_speed=settings.route_by_speed)
        self._prefix_index = PrefixIndex(settings.prefix_index_max_blocks)
        self._crash_suspects = CrashSuspects(clock, settings.crash_memory_s)
        self._queues: dict[str, ModelQueue] = {}
        self._slot_releaser = SlotReleaser(
            count or slots_in_use(settings), clock, settings.cancel_timeout_s, self._report_overdue
        )
        self._first_byte_monitor = FirstByteMonitor(
            self._instances, responds or answers_health(settings), self._settle
        )

    # Called by the supervisor and the nodes.

    def admit(self, upstream: Upstream, filled: Iterable[RestoredSlot] = ()) -> None:
        """Route requests to an instance; `filled` are its slots as its process began with them."""
        self._prefix_index.register(upstream, filled)
        self._instances.admit(upstream)
        self._queue(upstream.model).admitted()

    def withdraw(self, name: str) -> None:
        """Route no more requests to an instance; those that it holds continue."""
        if instance := self._instances.get(name):
            instance.in_service = False
            self._queue(instance.upstream.model).withdrawn(instance)

    def serves(self, model: str) -> bool:
        """Return whether an instance of the model is in service."""
        return bool(self._instances.in_service(model))

    def in_flight(self, name: str) -> int:
        return self.activity(name).in_flight

    def activity(self, name: str) -> Activity:
        instance = self._instances.get(name)
        return instance.activity if instance else Activity()

    def ended(self, name: str, *, is_crash: bool, reason: str = "") -> int:
        """Note that a process ended that was admitted with `reports_exit`, before it is withdrawn.

        Args:
            name: The instance.
            is_crash: Whether a signal ended it that was not ours, and a request may be to blame.
            reason: Why it ended, where clients should be told.

        Returns:
            How many requests of clients it computed, including those whose clients have left.
        """
        instance = self._instances.get(name)
        leases = {*instance.in_flight, *instance.ending} if instance else set()
        for lease in leases:
            lease.set_process_exit(is_crash=is_crash, reason=reason)
        # One request may hold several slots.
        requests = {
            id(lease.request): lease.request for lease in leases if not lease.request.is_background
        }
        if is_crash:
            self._crash_suspects.crashed(requests.values())
        return len(requests)

    async def wait_idle(self, name: str) -> None:
        """Wait until an instance holds no request. Without limit: `close` ends the wait."""
        if instance := self._instances.get(name):
            await instance.in_flight.wait_empty()

    async def close(self, name: str) -> None:
        """Withdraw an instance and abort what it holds; return when its connections are closed."""
        instance = self._instances.get(name)
        self.withdraw(name)
        if instance:
            instance.in_flight.abort(UpstreamShutDown(name))
            await instance.in_flight.wait_empty()

    def pause(self, model: str) -> None:
        """Queue all requests for a model, even where a slot is free."""
        self._queue(model).is_paused = True

    def resume(self, model: str) -> None:
        queue = self._queue(model)
        queue.is_paused = False
        queue.assign_slots()

    def demand(self, model: str) -> ModelDemand:
        queue, facts = self._queue(model), self._queue(model).stats()
        cached = sum(
            self._prefix_index.slot_map(instance.upstream.name).tokens
            for instance in self._instances.in_service(model)
        )
        return ModelDemand(
            facts.interactive + facts.batch,
            queue.in_flight,
            queue.ended_at_s,
            cached,
            queue.held,
        )

    def background_lease(self, name: str) -> AbstractAsyncContextManager[IsPreempted]:
        """Hold a slot for work of our own; the block gets a function that returns whether to leave.

        Raises:
            UpstreamShutDown: The instance is not in service, or was stopped.
            ProxyError: No slot was free in five seconds.
        """
        return background_lease(self, name)

    def conversation_fingerprints(
        self, name: str, listed: Sequence[SlotState]
    ) -> Mapping[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots; `listed` is its /slots now."""
        return self._prefix_index.fingerprints(name, listed, self._clock())

    async def run(self) -> None:
        """Free slots of aborted requests and watch for instances that do not respond."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._first_byte_monitor.serve())
            await self._slot_releaser.run()

    # Statistics.

    def instances(self) -> tuple[InstanceStats, ...]:
        """All that are in service or hold something."""
        models = {instance.upstream.model for instance in self._instances}
        counts = {one: self._prefix_index.conversations_per_instance(one) for one in models}
        weights = {one: self._instances.weights(one) for one in models}
        return tuple(
            instance.stats(
                counts[instance.upstream.model].get(instance.upstream.name, 0),
                weights[instance.upstream.model].get(instance.upstream.name, EQUAL),
            )
            for instance in self._instances
        )

    def queues(self) -> Mapping[str, QueueStats]:
        return {model: queue.stats() for model, queue in self._queues.items()}

    # A request.

    @asynccontextmanager
    async def lease(
        self, request: ProxyRequest, avoid: Collection[str] = (), loader: ModelLoader | None = None
    ) -> AsyncIterator[Lease]:
        """Hold one slot of an instance for the length of the block, after a wait if need be.

        The request is to be sent at once, to `lease.upstream` and with `lease.id_slot`. `finish`
        frees the slot at once; else it is free once the engine has confirmed that it is idle. A
        request that needs no slot takes none, and waits in no queue.

        Args:
            request: The request.
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
            UpstreamCrashed: In place of the error that a crash caused in the block.
        """
        self._crash_suspects.check(request)
        lease = await self._acquire(request, avoid, loader)
        try:
            self._crash_suspects.check(request)  # another like it may have crashed while it waited
            with lease:
                self._first_byte_monitor.watch(lease)
                await select_slots(lease, self._prefix_index, self._settings)
                try:
                    yield lease
                except UpstreamFailed as error:
                    if await lease.wait_crash(error):
                        raise UpstreamCrashed(
                            f"{lease.upstream.name} crashed while computing this request, which is "
                            "not retried; see its log (`corral logs`)"
                        ) from error
                    if lease.exit_reason and not isinstance(error, UpstreamConnectFailed):
                        raise UpstreamFailed(
                            f"{lease.upstream.name} ended while it computed this request: "
                            f"{lease.exit_reason}"
                        ) from error
                    raise
                self._crash_suspects.clear(request)
        except (UpstreamConnectFailed, CrashesEngine) as error:
            self._release(lease)  # the engine does not compute it
            if isinstance(error, UpstreamConnectFailed):
                self._listener.connect_failed(lease.upstream, error)
            raise
        finally:
            self._end(lease)

    def note_chunk(self, lease: Lease) -> None:
        """Note that one more request for a lease is sent now, to compute a part of its prompt."""
        if lease.slot:
            self._prefix_index.slot_map(lease.upstream.name).mark_sent(lease.slot)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a complete response, and learn from it.

        `completed` is None where the request was refused.
        """
        prompt = lease.request.prompt
        if completed:
            timings = completed.timings
            self._queue(lease.request.model).note_finished(lease, timings)
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
        if not request.may_load:
            loader = None
            if not queue.serves(request):
                raise NotLoaded(
                    f"{request.model} is not loaded, and this request does not load it; send a "
                    f"completion request, or run `corral load {request.model}`"
                )
        if request.kind.takes_slot:
            return await acquire_slot(queue, queued(request, avoid, self._clock()), loader)
        await ensure_serving(queue, request, loader)
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
        self._first_byte_monitor.forget(lease)
        instance.bytes_received += lease.progress.bytes_received
        for one in lease.slots:
            if one in instance.leases:
                self._slot_releaser.release_when_idle(one, queue.release)
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


def _calm(instance: Instance) -> tuple[bool, bool, float, float]:
    return (
        instance.is_spare,
        instance.upstream.is_on_trial,
        len(instance.in_flight) / instance.upstream.slots,
        instance.turn,
    )
