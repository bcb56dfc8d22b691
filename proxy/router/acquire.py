"""Leases of requests, from the wait for a slot until the engine confirms that the slot is idle.

A request waits for events, at most for its queue timeout. Requests that crash engines are refused.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Final

import orjson
from xxhash import xxh3_128_digest

from proxy.cache.prompt import Prompt
from proxy.cache.slot_map import Slot
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
from proxy.router.first_byte import FirstByteMonitor
from proxy.router.lease import Clock, Completion, Lease, ProcessExit, RoutingTarget
from proxy.router.model_queue import ModelQueue, ModelQueues
from proxy.router.queue import QueuedRequest, queue_entry
from proxy.router.release import SlotReleaser
from proxy.router.reports import RouterSignals, slot_use
from proxy.upstream.timings import Timings

_RETRY_AFTER_LOAD_S: Final = 10

# Returns once an instance of a model is admitted; see `ModelLoader.ensure_ready`.
Load = Callable[[str], Awaitable[None]]

_REFUSED_FROM: Final = 2
_SUSPECTS_MAX: Final = 1024
# Members that do not change the engine's work.
_IGNORED_MEMBERS: Final = frozenset(
    {
        "cache_prompt",
        "id_slot",
        "metadata",
        "model",
        "return_progress",
        "seed",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "timings_per_token",
        "user",
    }
)


class CrashSuspects:
    """Requests that engines were computing when they crashed.

    A request is recognised by path, model and body, without members that change between retries.
    It is unknown which of several requests caused a crash: all become suspects, and a request that
    completes is cleared. After a suspect's second crash it is refused. The latest 1024 are kept.

    Args:
        clock: Monotonic time.
        memory_s: How long a suspect is kept after its last crash, and refused after its second.
    """

    def __init__(self, clock: Clock, memory_s: float) -> None:
        self._clock = clock
        self._memory_s = memory_s
        self._suspects: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # crashes, last time

    def check(self, request: ProxyRequest) -> None:
        """Raise CrashesEngine if engines crashed twice while they computed a request."""
        if not self._suspects:  # hash nothing as long as no engine crashes
            return
        self._forget_old()
        crashes, at_s = self._suspects.get(fingerprint(request), (0, 0.0))
        if crashes >= _REFUSED_FROM:
            rest_s = math.ceil(at_s + self._memory_s - self._clock())
            raise CrashesEngine(
                f"{crashes} engines of {request.model} crashed while computing this "
                f"request; it is refused for {rest_s} s more: change it, or retry later"
            )

    def note_crash(self, requests: Iterable[ProxyRequest]) -> None:
        """Note that an engine crashed while it computed requests; equal ones count once."""
        for key in {fingerprint(request) for request in requests}:
            crashes, _ = self._suspects.pop(key, (0, 0.0))
            self._suspects[key] = crashes + 1, self._clock()
        while len(self._suspects) > _SUSPECTS_MAX:
            self._suspects.popitem(last=False)

    def clear(self, request: ProxyRequest) -> None:
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget_old(self) -> None:
        while self._suspects:
            key, (_, at_s) = next(iter(self._suspects.items()))
            if self._clock() - at_s < self._memory_s:
                return
            del self._suspects[key]


def fingerprint(request: ProxyRequest) -> bytes:
    """Return the hash by which a suspect is recognised: 16 bytes."""
    members = {name: value for name, value in request.json.items() if name not in _IGNORED_MEMBERS}
    if request.form:  # its boundary differs each time
        content = request.body.replace(request.form.boundary.encode(), b"")
    else:
        try:
            content = orjson.dumps(members, option=orjson.OPT_SORT_KEYS)
        except TypeError:  # JSON that can be read may be nested too deeply to be written
            content = request.body
    return xxh3_128_digest(f"{request.path}\0{request.model}\0".encode() + content)


async def acquire_slot(queue: ModelQueue, queued: QueuedRequest, load: Load | None) -> Lease:
    """Lease a slot of an instance, after a wait in the queue if none is free.

    Raises:
        QueueFull: Too many requests wait already.
        QueueTimeout: No slot became free in time.
        ModelLoading: No instance was ready in time.
        Unavailable: No instance is or will be ready; or the errors of `load`.
    """
    if lease := queue.bypass(queued):
        return lease
    try:
        queue.join(queued)
        if queued.lease is None:
            async with _queue_deadline(queue, queued.request):
                await _wait(queue, queued, load)
        return queue.begin(queued)
    finally:
        queue.remove(queued)


async def ensure_serving(queue: ModelQueue, request: ProxyRequest, load: Load | None) -> None:
    """Return once an instance is ready; raises the errors of `acquire_slot`."""
    if not queue.serves(request):
        async with _queue_deadline(queue, request):
            while not queue.serves(request):
                await _load(queue, request, load)


async def _wait(queue: ModelQueue, queued: QueuedRequest, load: Load | None) -> None:
    while queued.lease is None:
        queued.wake.clear()
        if queue.serves(queued.request):
            await queued.wake.wait()
        else:
            await _load_unless_assigned(queue, queued, load)


async def _load_unless_assigned(
    queue: ModelQueue, queued: QueuedRequest, load: Load | None
) -> None:
    async with asyncio.TaskGroup() as first:
        woken = first.create_task(queued.wake.wait())
        loading = first.create_task(_error_of(_load(queue, queued.request, load)))
        await asyncio.wait((woken, loading), return_when=asyncio.FIRST_COMPLETED)
        woken.cancel()
        loading.cancel()
    error = None if loading.cancelled() else loading.result()
    if error and queued.lease is None:
        raise error


async def _error_of(wait: Coroutine[None, None, None]) -> ProxyError | None:
    """Return the error of a wait; raised in a task group, it would be wrapped."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


async def _load(queue: ModelQueue, request: ProxyRequest, load: Load | None) -> None:
    """Load the model, unless another proxy forwarded the request and can use other machines."""
    before = queue.admissions
    if load and not request.is_from_proxy:
        await load(queue.model)
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
    """Leases slots of the instances in the queues' registry.

    Attributes:
        cache_use: Counts of prompts by the place in which they were found.
    """

    def __init__(  # noqa: PLR0913, PLR0917 (its neighbours)
        self,
        queues: ModelQueues,
        signals: RouterSignals,
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
        self._signals = signals
        self._crash_suspects = crash_suspects
        self._slot_releaser = slot_releaser
        self._first_byte_monitor = first_byte_monitor
        self.cache_use = CacheUse()
        self._slot_selector = slot_selector
        self._on_free = on_free
        self._cache_findings = CacheFindings(queues.prefix_index, queues.clock)

    @asynccontextmanager
    async def lease(
        self, request: ProxyRequest, avoid: Collection[str] = (), load: Load | None = None
    ) -> AsyncIterator[Lease]:
        """Hold one slot of an instance for the length of the block, after a wait if none is free.

        The block must send the request at once, to `lease.upstream` and with `lease.id_slot`.
        `finish` frees the slot at once; without it, the slot is free once the engine has confirmed
        that it is idle. A request that needs no slot takes none, and waits in no queue.

        Args:
            request: The request.
            avoid: Names of instances to take only if there is no other.
            load: Loads models; None: a model without an instance is unavailable.

        Raises:
            QueueFull: Too many requests wait already.
            QueueTimeout: No slot became free in time.
            ModelLoading: No instance was ready in time.
            CrashesEngine: Engines crashed while they computed it.
            NotLoaded: No instance is ready, and the request must not load one.
            Unavailable: No instance is or will be ready; or the errors of `load`.
            UpstreamShutDown: `close` ended the block.
            UpstreamSilent: The instance does not respond; another has a slot free.
            UpstreamCrashed: Replaces the error that a crash caused in the block.
            UpstreamKilled: Replaces the error that a SIGKILL from outside caused in it.
        """
        self._crash_suspects.check(request)
        lease = await self._acquire(request, avoid, load)
        try:
            self._crash_suspects.check(request)  # an equal request may have crashed meanwhile
            with lease:
                if request.keep_alive_s is not None and lease.upstream.node is None:
                    self._signals.keep_alive(request.model, request.keep_alive_s)
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
                self._signals.connect_failed(lease.upstream, error)
            raise
        finally:
            self._end(lease)

    async def _raise_exit(self, error: UpstreamFailed, lease: Lease) -> None:
        """Raise the error for the client if the end of a process caused the given one."""
        name, process_exit = lease.upstream.name, await lease.wait_exit(error)
        if process_exit is ProcessExit.KILLED:
            raise UpstreamKilled(name) from error
        if process_exit is ProcessExit.CRASHED:
            if lease.restored:  # the file may have caused the crash
                self._prefix_index.files.remove([lease.restored.file.name])
            if lease.upstream.is_on_trial:
                raise TrialCrashed(name) from error
            raise UpstreamCrashed(
                f"{name} crashed while computing this request, which is not retried; see its log "
                "(`corral logs`)"
            ) from error
        if lease.exit_reason and not isinstance(error, UpstreamConnectFailed):
            reason = f"{name} ended while it computed this request: {lease.exit_reason}"
            raise UpstreamFailed(reason) from error

    def note_chunk(self, lease: Lease) -> None:
        """Note that a request to compute a part of the prompt is sent now."""
        if lease.slot:
            self._prefix_index.slot_map(lease.upstream.name).mark_used(lease.slot)

    async def send_again(self, lease: Lease) -> None:
        """Return once the request may be sent again, after a complete response to it."""
        await self._slot_selector.enter(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a complete response, and learn from it.

        `completed` is None if the request was refused.
        """
        if completed:
            self._learn(lease, completed)
        for slot_lease in lease.slots:
            self._release(slot_lease)

    def _learn(self, lease: Lease, completed: Completion) -> None:
        request, timings, name = lease.request, completed.timings, lease.upstream.name
        prompt = request.prompt
        self._queues.queue_of(request.model).note_finished(lease, timings)
        if prompt:
            if timings:
                self.cache_use.note(lease, timings)
                lease.finding = self._cache_findings.find(lease, timings, completed.reply)
            self._prefix_index.record(name, prompt, lease.expected_cached, timings, completed.reply)
            if lease.upstream.node is None:
                self._prefix_index.digests.note(
                    name, request.model, request.client, prompt, completed.reply
                )
        if timings:
            is_apart = request.owner.is_alone or lease.is_cache_off
            if is_apart and lease.owners:
                lease.owners.end(request.owner, lease.id_slot)
            if prompt and lease.slot:
                self._record_slot(lease, lease.slot, prompt, timings)

    async def _acquire(
        self, request: ProxyRequest, avoid: Collection[str], load: Load | None
    ) -> Lease:
        queue = self._queues.queue_of(request.model)
        if not request.may_load:
            load = None
            if not queue.serves(request):
                raise NotLoaded(
                    f"{request.model} is not loaded, and this request does not load it; send a "
                    f"completion request, or run `corral load {request.model}`"
                )
        if request.kind.takes_slot:
            lease = await acquire_slot(queue, queue_entry(request, avoid, self._clock()), load)
            self._signals.slots_taken(lease, lease.upstream, len(lease.slots))
            return lease
        await ensure_serving(queue, request, load)
        instances = [
            instance
            for instance in self._instances.of_model(request.model).answering
            if instance.may_take(request)
        ]
        fresh = [instance for instance in instances if instance.upstream.name not in avoid]
        chosen = min(
            fresh or instances,
            key=lambda instance: (
                instance.is_spare,
                instance.upstream.is_on_trial,
                len(instance.in_flight) / instance.upstream.slots,
                instance.turn,
            ),
        )
        return Lease(request, chosen, self._clock)

    def _record_slot(self, lease: Lease, slot: Slot, prompt: Prompt, timings: Timings) -> None:
        name = lease.upstream.name
        if lease.restored_tokens and lease.id_slot is not None:
            self._signals.restore_verified(name, lease.restored_tokens, timings)
        if lease.conversation:
            held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
            slot_map = self._prefix_index.slot_map(name)
            if slot_map.host_cache:
                slot_map.host_cache.note_found(lease.conversation, timings.cached_tokens)
            slot_map.release(lease, self._clock())
            slot_map.set_conversation(slot, lease.conversation, held, prompt.blocks)
            if lease.upstream.cache_key:
                self._slot_selector.note_turn(lease, timings)

    def _release(self, lease: Lease, held: Iterable[int] = ()) -> None:
        """Free one slot, and report its use; `held` are the tokens in idle slots."""
        lease.note_released()
        if lease.is_taken:
            lease.is_taken = False
            self._signals.slots_freed(lease, slot_use(lease, len(lease.slots), held))
        self._queues.queue_of(lease.request.model).release(lease)
        if lease.upstream.cache_key:
            self._on_free(lease.instance)

    def _end(self, lease: Lease) -> None:
        instance = lease.instance
        self._first_byte_monitor.forget(lease)
        instance.bytes_received += lease.progress.bytes_received
        for slot_lease in lease.slots:
            if slot_lease in instance.leases:
                self._slot_releaser.release_when_idle(slot_lease, self._release)
        self._instances.discard_if_unused(instance)
