"""Leases of requests: from the wait for a slot until the engine has confirmed that it is idle.

A request waits for events, and no longer than its queue timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Final, Protocol

from proxy.cache.prompt import Prompt
from proxy.cache.slot_map import TrackedSlot
from proxy.errors import (
    CrashesEngine,
    ModelLoading,
    NotLoaded,
    ProxyError,
    QueueTimeout,
    TrialCrashed,
    Unavailable,
    UpstreamConnectFailed,
    UpstreamCrashed,
    UpstreamFailed,
    UpstreamKilled,
)
from proxy.request.request import ProxyRequest
from proxy.router.cache_use import CacheFindings, CacheUse
from proxy.router.choose_slot import SlotSelector
from proxy.router.crash_suspects import CrashSuspects
from proxy.router.first_byte import FirstByteMonitor
from proxy.router.lease import Completion, Lease, ProcessExit, RoutingTarget
from proxy.router.model_queue import ModelQueue, ModelQueues
from proxy.router.queue import QueuedRequest, queued
from proxy.router.release import SlotReleaser
from proxy.router.reports import RouterListener, use_of
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream

_RETRY_AFTER_LOAD_S: Final = 10


class Loader(Protocol):
    async def ensure_ready(self, model: str, /) -> None:
        """As `proxy.request.models.ModelLoader.ensure_ready`."""


async def acquire_slot(queue: ModelQueue, queued: QueuedRequest, loader: Loader | None) -> Lease:
    """Lease a slot of one of the instances, after a wait in the queue if need be.

    Raises:
        QueueFull: Too many requests wait already.
        QueueTimeout: No slot became free in time.
        ModelLoading: No instance was ready in time.
        Unavailable: No instance is ready, and none will be; the loader may raise its own errors.
    """
    if lease := queue.bypass(queued):
        return lease
    try:
        queue.join(queued)
        if queued.lease is None:
            async with _queue_deadline(queue, queued.request):
                await _wait(queue, queued, loader)
        return queue.begin(queued)
    finally:
        queue.remove(queued)


async def ensure_serving(queue: ModelQueue, request: ProxyRequest, loader: Loader | None) -> None:
    """Return once an instance is ready; raises as `acquire_slot` does."""
    if not queue.serves(request):
        async with _queue_deadline(queue, request):
            while not queue.serves(request):
                await _load(queue, request, loader)


async def _wait(queue: ModelQueue, queued: QueuedRequest, loader: Loader | None) -> None:
    while queued.lease is None:
        queued.wake.clear()
        if queue.serves(queued.request):
            await queued.wake.wait()
        else:
            await _load_unless_assigned(queue, queued, loader)


async def _load_unless_assigned(
    queue: ModelQueue, queued: QueuedRequest, loader: Loader | None
) -> None:
    """Load the model, unless a slot becomes free first."""
    async with asyncio.TaskGroup() as first:
        woken = first.create_task(queued.wake.wait())
        loading = first.create_task(_error_of(_load(queue, queued.request, loader)))
        await asyncio.wait((woken, loading), return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        loading.cancel()
    error = None if loading.cancelled() else loading.result()
    if error and queued.lease is None:
        raise error


async def _error_of(wait: Coroutine[None, None, None]) -> ProxyError | None:
    """Return the error of a wait: a task group would wrap it."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


async def _load(queue: ModelQueue, request: ProxyRequest, loader: Loader | None) -> None:
    """Load the model, unless another proxy forwarded the request: it has other machines."""
    before = queue.admissions
    if loader and not request.is_from_proxy:
        await loader.ensure_ready(queue.model)
    if not queue.serves(request) and queue.admissions == before:
        raise Unavailable(f"no instance of {queue.model} is ready; retry later")


@asynccontextmanager
async def _queue_deadline(queue: ModelQueue, request: ProxyRequest) -> AsyncIterator[None]:
    limit = asyncio.timeout(request.queue_timeout_s)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        if not queue.serves(request):
            sentence = f"{queue.model} is still loading; retry later"
            raise ModelLoading(sentence, _RETRY_AFTER_LOAD_S) from None
        waited = f"timed out after {request.queue_timeout_s:g} s waiting for a free slot"
        sentence = f"{waited} of {queue.model}; retry later"
        raise QueueTimeout(sentence, queue.retry_after_s) from None


class Leases:
    """Leases slots of the instances that the queues know.

    Attributes:
        cache_use: Where prompts were found.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (its neighbours)
        self,
        queues: ModelQueues,
        listener: RouterListener,
        crash_suspects: CrashSuspects,
        slot_releaser: SlotReleaser,
        first_byte_monitor: FirstByteMonitor,
        slot_selector: SlotSelector,
        on_free: Callable[[RoutingTarget], None],
    ) -> None:
        self._queues = queues
        self._instances = queues.instances
        self._prefix_index = queues.prefix_index
        self._clock = queues.clock
        self._listener = listener
        self._crash_suspects = crash_suspects
        self._slot_releaser = slot_releaser
        self._first_byte_monitor = first_byte_monitor
        self.cache_use = CacheUse()
        self._slot_selector = slot_selector
        self._on_free = on_free
        self._cache_findings = CacheFindings(queues.prefix_index, queues.clock)

    @asynccontextmanager
    async def lease(
        self, request: ProxyRequest, avoid: Collection[str] = (), loader: Loader | None = None
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
            UpstreamKilled: In place of the error that a SIGKILL from outside caused in it.
        """
        self._crash_suspects.check(request)
        lease = await self._acquire(request, avoid, loader)
        try:
            self._crash_suspects.check(request)  # another like it may have crashed while it waited
            with lease:
                if request.keep_alive_s is not None and lease.upstream.node is None:
                    self._listener.keep_alive(request.model, request.keep_alive_s)
                self._first_byte_monitor.watch(lease)
                await self._slot_selector.select(lease)
                try:
                    yield lease
                except UpstreamFailed as error:
                    await self._raise_exit(error, lease)
                    raise
                self._crash_suspects.clear(request)
        except (UpstreamConnectFailed, CrashesEngine) as error:
            for slot_lease in lease.slots:
                self._release(slot_lease)  # the engine does not compute it
            if isinstance(error, UpstreamConnectFailed):
                self._listener.connect_failed(lease.upstream, error)
            raise
        finally:
            self._end(lease)

    async def _raise_exit(self, error: UpstreamFailed, lease: Lease) -> None:
        """Raise what a client is told in place of an error that the end of a process caused."""
        name, process_exit = lease.upstream.name, await lease.wait_exit(error)
        if process_exit is ProcessExit.KILLED:
            raise UpstreamKilled(name) from error
        if process_exit is ProcessExit.CRASHED:
            if lease.restored:  # the file may be to blame
                self._prefix_index.files.remove([lease.restored.file.name])
            raise _crash_error(lease.upstream) from error
        if lease.exit_reason and not isinstance(error, UpstreamConnectFailed):
            reason = f"{name} ended while it computed this request: {lease.exit_reason}"
            raise UpstreamFailed(reason) from error

    def note_chunk(self, lease: Lease) -> None:
        """Note that one more request for a lease is sent now, to compute a part of its prompt."""
        if lease.slot:
            self._prefix_index.slot_map(lease.upstream.name).mark_sent(lease.slot)

    async def send_again(self, lease: Lease) -> None:
        """Return once the request may be sent once more, after a whole response to it."""
        await self._slot_selector.enter(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a complete response, and learn from it.

        `completed` is None where the request was refused.
        """
        prompt = lease.request.prompt
        if completed:
            timings = completed.timings
            self._queues.of(lease.request.model).note_finished(lease, timings)
            if prompt:
                if timings:
                    self.cache_use.note(lease, timings)
                    lease.finding = self._cache_findings.find(lease, timings, completed.reply)
                self._prefix_index.record(
                    lease.upstream.name, prompt, lease.expected_cached, timings, completed.reply
                )
                self._note_for_others(lease, prompt, completed)
            is_apart = lease.request.owner.is_alone or lease.is_cache_off
            if timings and is_apart and lease.owners:
                lease.owners.end(lease.request.owner, lease.id_slot)
            if timings and prompt and lease.slot:
                self._record_slot(lease, lease.slot, timings)
        for slot_lease in lease.slots:
            self._release(slot_lease)

    def _note_for_others(self, lease: Lease, prompt: Prompt, completed: Completion) -> None:
        if lease.upstream.node is None:
            self._prefix_index.digests.note(
                lease.upstream.name,
                lease.request.model,
                lease.request.client,
                prompt,
                completed.reply,
            )

    async def _acquire(
        self, request: ProxyRequest, avoid: Collection[str], loader: Loader | None
    ) -> Lease:
        queue = self._queues.of(request.model)
        if not request.may_load:
            loader = None
            if not queue.serves(request):
                raise NotLoaded(
                    f"{request.model} is not loaded, and this request does not load it; send a "
                    f"completion request, or run `corral load {request.model}`"
                )
        if request.kind.takes_slot:
            lease = await acquire_slot(queue, queued(request, avoid, self._clock()), loader)
            self._listener.slots_taken(lease, lease.upstream, len(lease.slots))
            return lease
        await ensure_serving(queue, request, loader)
        instances = [
            instance
            for instance in self._instances.of(request.model).answering
            if instance.may_take(request)
        ]
        fresh = [instance for instance in instances if instance.upstream.name not in avoid]
        return Lease(request, min(fresh or instances, key=_load_order), self._clock)

    def _record_slot(self, lease: Lease, slot: TrackedSlot, timings: Timings) -> None:
        name, prompt = lease.upstream.name, lease.request.prompt
        if lease.restored_tokens and lease.id_slot is not None:
            self._listener.restore_verified(name, lease.restored_tokens, timings)
        if lease.conversation and prompt:
            held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
            slot_map = self._prefix_index.slot_map(name)
            slot_map.note_found(lease.conversation, timings.cached_tokens)
            slot_map.release(lease, self._clock())
            slot_map.set_conversation(slot, lease.conversation, held, prompt.blocks)
            if lease.upstream.cache_key:
                self._slot_selector.note_turn(lease, timings)

    def _release(self, lease: Lease, held: Iterable[int] = ()) -> None:
        """Free one slot, and tell what its request took; `held` are the tokens in idle slots."""
        lease.note_released()
        if lease.is_taken:
            lease.is_taken = False
            self._listener.slots_freed(lease, use_of(lease, len(lease.slots), held))
        self._queues.of(lease.request.model).release(lease)
        if lease.upstream.cache_key:
            self._on_free(lease.instance)

    def _release_idle(self, lease: Lease) -> None:
        self._release(lease, self._slot_releaser.held_tokens(lease))

    def _end(self, lease: Lease) -> None:
        instance = lease.instance
        self._first_byte_monitor.forget(lease)
        instance.bytes_received += lease.progress.bytes_received
        for slot_lease in lease.slots:
            if slot_lease in instance.leases:
                self._slot_releaser.release_when_idle(slot_lease, self._release_idle)
        self._instances.discard_if_unused(instance)


def _crash_error(upstream: Upstream) -> UpstreamCrashed:
    if upstream.is_on_trial:
        return TrialCrashed(upstream.name)
    return UpstreamCrashed(
        f"{upstream.name} crashed while computing this request, which is not retried; see its log "
        "(`corral logs`)"
    )


def _load_order(instance: RoutingTarget) -> tuple[bool, bool, float, float]:
    return (
        instance.is_spare,
        instance.upstream.is_on_trial,
        len(instance.in_flight) / instance.upstream.slots,
        instance.turn,
    )
