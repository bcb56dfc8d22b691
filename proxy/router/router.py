"""The router: which instance answers which request.

An instance has as many leases as slots, so no request waits inside an engine. A request that finds
no free slot, or no instance, waits in the queue of its model. A withdrawn instance gets no new
leases and keeps those it has. State changes only in methods without `await`.

A background lease is for work of our own, such as the prefill of a prompt. It takes a slot like a
client's request, so the tracked contents of slots stay correct. It waits behind every client, and
ends when a client needs the instance, because an engine computes two prompts one after the other.
"""

from __future__ import annotations

import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Final, ParamSpec

from attrs import define, field

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot, SlotFile
from proxy.cache.index import PrefixIndex
from proxy.cache.miss_cause import client_hash
from proxy.cache.prompt import Prompt, called_tools, read_prompt, with_answer
from proxy.cache.save_policy import CountedStorage, SlotFileStorage, pays_to_restore
from proxy.cache.slot_map import Slot
from proxy.errors import (
    CrashesEngine,
    NotLoaded,
    ProxyError,
    TrialCrashed,
    Unfinished,
    UpstreamConnectFailed,
    UpstreamCrashed,
    UpstreamFailed,
    UpstreamKilled,
    UpstreamShutDown,
)
from proxy.observe.cache_finding import TOKENS_MIN, NoFile
from proxy.observe.past import InternalWork
from proxy.observe.record import Emit, discard
from proxy.request.request import ProxyRequest
from proxy.router.engine_faults import (
    CrashSuspects,
    FirstByteMonitor,
    ListSlots,
    Responds,
    SlotReleaser,
    answers_health,
)
from proxy.router.lease import (
    EQUAL,
    Activity,
    Clock,
    Completion,
    InstanceStats,
    Lease,
    ProcessExit,
    RoutingTarget,
    SlotUse,
    SlotYielded,
    cut_off_tokens,
    slot_use,
)
from proxy.router.model_queue import Load, ModelDemand, ModelQueue, ModelQueues
from proxy.router.next_turns import NextTurns
from proxy.router.node_files import NodeFileTaker
from proxy.router.queue import QueuedRequest, queue_entry
from proxy.router.registry import Instances, InstanceTasks
from proxy.router.slot_saver import SlotSaver
from proxy.router.slots import CacheContents, CacheFindings, CacheUse, SlotSelector, cache_contents
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Timings, Upstream

_PATIENCE_S: Final = 5.0

IsPreempted = Callable[[], bool]

_Given = ParamSpec("_Given")


class Signal(list[Callable[_Given, object]]):
    """Calls its members, which must not fail or block."""

    def connect(self, handler: Callable[_Given, object]) -> None:
        self.append(handler)

    def __call__(self, *given: _Given.args, **named: _Given.kwargs) -> None:
        for handler in self:
            handler(*given, **named)


class RouterSignals:
    """The reports of a router."""

    def __init__(self) -> None:
        self.idle = Signal[[]]()  # A model holds no request any more.
        self.admitted = Signal[[]]()  # An instance gets requests now.
        # An instance did not begin its response to a request.
        self.connect_failed = Signal[[Upstream, UpstreamConnectFailed]]()
        # An engine still computes although its request ended `cancel_timeout_s` ago; with the
        # reason.
        self.overdue = Signal[[Upstream, str]]()
        # A request wants its local model to stay loaded for so many seconds after it; infinity:
        # forever.
        self.keep_alive = Signal[[str, float]]()
        # The first response to a prompt ended whose slot was filled with so many tokens of it; the
        # instance's name comes first.
        self.restore_verified = Signal[[str, int, Timings]]()
        # The engine found too little of the beginning of a prompt that this slot file should have.
        self.file_outdated = Signal[[str]]()
        # A request, known by its lease, got so many slots of an instance.
        self.slots_taken = Signal[[Hashable, Upstream, int]]()
        # The last bytes of a response go out next, unless its client is behind.
        self.answered = Signal[[Lease]]()
        # The slots of a request are idle again; called once for each `slots_taken`.
        self.slots_freed = Signal[[Hashable, SlotUse]]()
        # So many tokens were computed for a client, prompt and answer together.
        self.charged = Signal[[str, int]]()


def _background_request(upstream: Upstream, work: InternalWork) -> ProxyRequest:
    """Return a request that stays on this machine and loads nothing, like a forwarded one."""
    return ProxyRequest(
        request_id=f"warm-{upstream.name}",
        path="/v1/chat/completions",
        kind=EndpointKind.CHAT,
        model=upstream.model,
        client=work,
        priority="batch",
        queue_timeout_s=_PATIENCE_S,
        is_from_proxy=True,
        is_background=True,
    )


@define(eq=False)
class _Leasing(AbstractAsyncContextManager[Lease]):
    """The block of `Router.lease`; a generator in its place would take microseconds."""

    begin: Awaitable[Lease]
    end: Callable[[Lease, BaseException | None], Coroutine[Any, Any, None]]
    lease: Lease = field(init=False)

    async def __aenter__(self) -> Lease:
        self.lease = await self.begin
        return self.lease

    def __aexit__(
        self, _kind: object, error: BaseException | None, _trace: object
    ) -> Coroutine[Any, Any, None]:
        return self.end(self.lease, error)


class Router:
    """The instances, and the requests that they answer or that wait for them.

    The name of an unknown instance or model is not an error.

    Args:
        emit: Emits `upstream.failed` if an engine does not free a slot.
        list_slots: Reads the slots of an instance; None: its `/slots`.
        responds: Returns whether an instance responds; None: by its `/health`.
        is_on_battery: Returns whether the machine runs on its battery.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        emit: Emit = discard,
        *,
        clock: Clock = time.monotonic,
        list_slots: ListSlots | None = None,
        responds: Responds | None = None,
        is_on_battery: Callable[[], bool] = bool,
    ) -> None:
        self._settings = settings
        self._emit = emit
        self._clock = clock
        self.signals = RouterSignals()  # What happens to instances and slots.
        # The instances in service, and those that still hold requests.
        self.registry = Instances(clock, route_by_speed=settings.route_by_speed)
        # What they and the slot files hold, and who owns which conversation.
        self.cache = PrefixIndex(settings.prefix_index_max_blocks, clock)
        # The queue of each model, with its measurements.
        self.queues = ModelQueues(self.registry, self.cache, settings, clock, self.signals.idle)
        self.cache_use = CacheUse()  # Counts of prompts by the place in which they were found.
        self.storage = CountedStorage()  # The storage of slot files, with counts of its operations.
        if list_slots is None:
            list_slots = partial(get_slots, settings=settings)
        self._tasks = InstanceTasks()
        self._crash_suspects = CrashSuspects(clock, settings.crash_memory_s)
        self._slot_releaser = SlotReleaser(
            list_slots, clock, settings.cancel_timeout_s, self._report_overdue, self._tasks
        )
        responds = responds or partial(answers_health, settings=settings)
        self._first_byte_monitor = FirstByteMonitor(
            self.registry, responds, self.queues.assign_slots, self._tasks
        )
        self._saver = SlotSaver(self.cache, settings, self.storage, clock, list_slots, self._tasks)
        # Next turns of conversations, computed while an instance is idle.
        self.next_turns = NextTurns(
            prefix_index=self.cache,
            settings=settings,
            saver=self._saver,
            clock=clock,
            list_slots=list_slots,
            tasks=self._tasks,
            emit=emit,
            is_on_battery=is_on_battery,
            slots_taken=self.signals.slots_taken,
            slots_freed=self.signals.slots_freed,
        )
        # The number of conversations that were not saved, by model and reason.
        self.saves_skipped: Mapping[tuple[str, NoFile], int] = self._saver.skipped
        self.node_files = NodeFileTaker(self.cache)  # Takes slot files from other machines.
        self._slot_selector = SlotSelector(
            self.cache, self.registry, settings, self._saver, self.node_files
        )
        self._cache_findings = CacheFindings(self.cache, clock)

    # Called by the supervisor and the nodes.

    def admit(
        self,
        upstream: Upstream,
        filled: Iterable[RestoredSlot] = (),
        storage: SlotFileStorage | None = None,
    ) -> None:
        """Route requests to an instance.

        `filled` are the slots that its process restored; `storage` stores its slots on disk.
        """
        self.storage.forget(upstream.name)
        if storage:
            self.storage.add(upstream.name, upstream.model, storage)
        self.cache.register(upstream, filled)
        self.registry.admit(upstream, self.cache.bit(upstream.name))
        self.queues[upstream.model].note_admission()
        self.signals.admitted()

    def withdraw(self, name: str) -> None:
        """Route no more requests to an instance; those in flight continue."""
        if instance := self.registry.get(name):
            if instance in self.next_turns.running:
                self.next_turns.abort(instance)
            self.registry.withdraw(instance)
            self.queues[instance.upstream.model].note_withdrawal(instance)

    def serves(self, model: str) -> bool:
        return bool(self.registry.in_service(model))

    def note_task(self, name: str) -> None:
        """Note that an instance got a task without a lease, which may have used any idle slot."""
        if slot_map := self.cache.slot_maps.get(name):
            slot_map.note_task()

    def count_in_flight(self, name: str) -> int:
        return self.activity(name).in_flight

    def activity(self, name: str) -> Activity:
        """Return the requests of an instance; cheap enough for several calls a second."""
        instance = self.registry.get(name)
        return instance.activity if instance else Activity()

    def note_end(self, name: str, process_exit: ProcessExit, *, reason: str = "") -> int:
        """Note that the process of an instance with `reports_exit` ended; call before `withdraw`.

        Args:
            name: The instance.
            process_exit: How it ended.
            reason: Why it ended, for clients whose answers it cuts; empty: they are not told.

        Returns:
            The number of clients' requests that it computed, including those whose clients left.
        """
        self.cache.note_end(name, has_failed=process_exit != "stopped")
        instance = self.registry.get(name)
        leases = {*instance.in_flight, *instance.ending} if instance else set()
        for lease in leases:
            lease.set_process_exit(process_exit, reason)
        # A request may hold several slots.
        requests = {
            id(lease.request): lease.request
            for lease in leases
            if not (lease.request.is_background or lease.is_unsent)
        }
        if process_exit == "crashed":
            self._crash_suspects.note_crash(requests.values())
        return len(requests)

    async def wait_idle(self, name: str) -> None:
        """Wait until an instance holds no request. The wait has no limit; `close` ends it."""
        if instance := self.registry.get(name):
            await instance.in_flight.wait_empty()

    async def close(self, name: str) -> None:
        """Withdraw an instance, abort its requests, and wait until their connections are closed."""
        instance = self.registry.get(name)
        self.withdraw(name)
        if instance:
            instance.in_flight.abort(UpstreamShutDown(name))
            await instance.in_flight.wait_empty()

    def forget(self, name: str) -> bool:
        """Forget an instance for good; return False if it still holds a request."""
        if self.registry.get(name):
            return False
        self.registry.forget(name)
        self.cache.forget(name)
        self.storage.forget(name)
        return True

    def pause(self, model: str) -> None:
        """Queue all requests for a model, even if a slot is free."""
        self.queues[model].is_paused = True

    def resume(self, model: str) -> None:
        queue = self.queues[model]
        queue.is_paused = False
        queue.assign_slots()

    def demand(self, model: str) -> ModelDemand:
        return self.queues[model].demand()

    def add_slot_file(self, file: SlotFile) -> None:
        self.cache.files.add(file)
        for queue in self.queues.values():
            queue.assign_slots()  # a request may have waited for it

    def note_read_time(self, byte_s: float) -> None:
        """Note how long it takes to read a byte of a slot file, as measured without an engine."""
        self.cache.files.set_read_time(byte_s)

    @property
    def prefill_rates(self) -> Mapping[str, float]:
        """Prompt tokens per second, by the cache key of engines."""
        return self.cache.files.prefill_rates

    def set_prefill_rates(self, rates: Mapping[str, float]) -> None:
        """Set rates that were measured before the first prompt of this process."""
        for cache_key, tps in rates.items():
            self.cache.files.set_prefill_rate(cache_key, tps)

    def pays_to_read(self, file: SlotFile) -> bool:
        """Return whether an empty slot is filled sooner from a file than by computing it."""
        cost = self.cache.files.cost_tokens(file.cache_key, file.size_bytes)
        return pays_to_restore(file.tokens, cost)

    def remove_slot_files(self, names: Iterable[str]) -> None:
        self.cache.files.remove(names)

    def prefix_storing_instances(self, model: str, blocks: Sequence[int] = ()) -> list[Upstream]:
        """Return the instances of a model that can restore a file of a shared prefix.

        Those that hold a prompt with these blocks come first.
        """
        runs, holders = self.cache.with_files.values(), self.cache.holders(blocks)
        found = [
            instance
            for instance in filter(None, (self.registry.get(run.name) for run in runs))
            if instance.in_service
            and instance.upstream.model == model
            and instance.upstream.cache_key
            # Such a file has a user's message behind the prefix.
            and not instance.upstream.is_all_or_nothing
        ]
        found.sort(key=lambda instance: not instance.bit & holders)
        return [instance.upstream for instance in found]

    def are_in_use(self, numbers: Collection[int]) -> bool:
        leases = (lease for instance in self.registry for lease in instance.leases)
        return any(lease.conversation_number in numbers for lease in leases)

    @asynccontextmanager
    async def background_lease(self, name: str, work: InternalWork) -> AsyncIterator[IsPreempted]:
        """Hold a slot of one instance for work of our own.

        The block gets a function that returns True once a client needs the slot, or the instance is
        withdrawn; the block must then end soon.

        Raises:
            UpstreamShutDown: The instance is not in service, or was stopped.
            ProxyError: No slot was free within 5 s.
        """
        others = {instance.upstream.name: instance.upstream for instance in self.registry}
        ours = others.pop(name, None)
        if ours is None:
            raise UpstreamShutDown(name)
        async with self.lease(_background_request(ours, work), others) as lease:
            if lease.upstream.name != name:
                self.finish(lease)
                raise UpstreamShutDown(name)

            def is_preempted() -> bool:
                is_wanted = self.demand(ours.model).waiting > 0 or self.count_in_flight(name) > 1
                return is_wanted or not lease.instance.in_service

            yield is_preempted
            self.finish(lease)
            self.note_task(name)  # the block may have used other slots

    def conversation_fingerprints(
        self, name: str, listed: Sequence[SlotState]
    ) -> Mapping[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots; `listed` is its /slots now."""
        return self.cache.fingerprints(name, listed)

    def conversation_owner(self, fingerprint: ConversationFingerprint) -> str | None:
        return self.cache.owner(fingerprint)

    async def run(self) -> None:
        """Free slots of aborted requests, save idle slots, and watch for silent instances."""
        await self._tasks.run()

    def charge(self, use: SlotUse) -> None:
        """Report tokens that were computed for a client in a background lease."""
        self.signals.slots_freed(object(), use)
        self.signals.charged(use.client, use.tokens.total)

    # Statistics.

    def cache_contents(self) -> Mapping[str, CacheContents]:
        return cache_contents(self.registry.local, self.cache.slot_maps)

    def instances(self) -> tuple[InstanceStats, ...]:
        models = {instance.upstream.model for instance in self.registry}
        counts = {model: self.cache.conversations_per_instance(model) for model in models}
        weights = {model: self.registry.of_model(model).weights for model in models}
        return tuple(
            instance.stats(
                counts[instance.upstream.model].get(instance.upstream.name, 0),
                weights[instance.upstream.model].get(instance.upstream.name, EQUAL),
                self.queues[instance.upstream.model].holds.slots(instance),
            )
            for instance in self.registry
        )

    def as_client_knows(self, request: ProxyRequest) -> ProxyRequest:
        """Return a request for an estimate that uses only cache content of its own key."""
        if (prompt := request.prompt) is None or not request.owner.name:
            return request
        client = client_hash(request.model, request.client)
        blocks = self.cache.recent.own_blocks(client, prompt)
        return replace(request, prompt=prompt.known_to(blocks))

    # A request.

    def lease(
        self,
        request: ProxyRequest,
        avoid: Collection[str] = (),
        load: Load | None = None,
        yielded: SlotYielded | None = None,
    ) -> _Leasing:
        """Hold one slot of an instance for the length of the block, after a wait if none is free.

        The block must send the request at once, to `lease.upstream` and with `lease.id_slot`.
        `finish` frees the slot at once; without it, the slot is free once the engine has confirmed
        that it is idle. A request that needs no slot takes none, and waits in no queue.

        Args:
            avoid: Names of instances to take only if there is no other.
            load: Loads models; None: a model without an instance is unavailable.
            yielded: How the request yielded its last slot; it keeps its place, and waits for as
                long as it takes, because its client has a part of the answer.

        Raises:
            SlotYielded: The slot goes to a request of higher priority.
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
        return _Leasing(self._begin(request, avoid, load, yielded), self._end)

    async def _begin(
        self,
        request: ProxyRequest,
        avoid: Collection[str],
        load: Load | None,
        yielded: SlotYielded | None,
    ) -> Lease:
        """Begin the block of a lease."""
        self._crash_suspects.check(request)
        queue = self.queues[request.model]
        queued = queue_entry(request, avoid, self._clock(), yielded)
        lease = queue.lease_now(queued) or await self._acquire(queue, queued, load)
        if lease.is_taken:
            self.signals.slots_taken(lease, lease.upstream, 1 + len(lease.beside))
        try:
            self._crash_suspects.check(request)  # an equal request may have crashed meanwhile
            lease.__enter__()
            if lease.is_taken and lease.instance in self.next_turns.running:
                self.next_turns.abort(lease.instance)
            if request.keep_alive_s is not None and lease.upstream.node is None:
                self.signals.keep_alive(request.model, request.keep_alive_s)
            self._first_byte_monitor.watch(lease)
            await self._slot_selector.select(lease)
        except BaseException as error:
            self._leave(lease, error)
            raise
        return lease

    async def _end(self, lease: Lease, error: BaseException | None) -> None:
        """End the block of a lease; raise the error for the client if it is another one."""
        if error is None:
            self._crash_suspects.clear(lease.request)
        try:
            if isinstance(error, UpstreamFailed):
                await self._raise_exit(error, lease)
        except BaseException as found:
            self._leave(lease, found)
            raise
        self._leave(lease, error)

    def _leave(self, lease: Lease, error: BaseException | None) -> None:
        """Free the slots of a lease that ends; raise the error that cut it, if one did."""
        try:
            lease.__exit__(type(error) if error else None, error, None)
        except ProxyError as cut_by:
            error = cut_by
            raise
        finally:
            if error and isinstance(error, UpstreamConnectFailed | CrashesEngine):
                for slot_lease in lease.slots:
                    self._release(slot_lease)  # the engine does not compute it
                if isinstance(error, UpstreamConnectFailed):
                    self.signals.connect_failed(lease.upstream, error)
            self._first_byte_monitor.forget(lease)
            instance = lease.instance
            instance.bytes_received += lease.progress.bytes_received
            for slot_lease in (lease, *lease.beside) if instance.leases else ():
                if slot_lease in instance.leases:
                    self._slot_releaser.release_when_idle(slot_lease, self._release)
            if not instance.in_service:
                self.registry.discard_if_unused(instance)

    async def _raise_exit(self, error: UpstreamFailed, lease: Lease) -> None:
        """Raise the error for the client if the end of a process caused the given one."""
        name, process_exit = lease.upstream.name, await lease.wait_exit(error)
        if process_exit == "killed":
            raise UpstreamKilled(name) from error
        if process_exit == "crashed":
            if lease.restored:  # the file may have caused the crash
                self.cache.files.remove([lease.restored.file.name])
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
            self.cache.slot_maps[lease.upstream.name].mark_used(lease.slot)

    async def save_beginning(self, lease: Lease, tokens: int) -> bool:
        """Save the first `tokens` of a prompt, which its slot holds; return whether that worked."""
        return await self._saver.save_beginning(lease, tokens)

    async def aim(self, lease: Lease) -> None:
        """Make the engine take the slot that `id_slot` says for a request that cannot name it."""
        await self._slot_selector.aim(lease)

    def note_beginning(self, lease: Lease, *, is_saved: bool) -> None:
        """Note that a request will compute no more of its beginning for others."""
        if is_saved:
            lease.beginning_saved_at_s = self._clock()
        else:
            lease.beginning_blocks = 0
        self.queues.assign_slots(lease.request.model)

    async def send_again(self, lease: Lease) -> None:
        """Return once the request may be sent again, after a complete response to it."""
        lease.is_placed = False
        await self._slot_selector.enter(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a complete response, and learn from it.

        `completed` is None if the request was refused.
        """
        if completed:
            self._learn(lease, completed)
        for slot_lease in (lease, *lease.beside):
            self._release(slot_lease)

    def _learn(self, lease: Lease, completed: Completion) -> None:
        request, timings, name = lease.request, completed.timings, lease.upstream.name
        prompt = request.prompt
        self.queues[request.model].note_finished(lease, timings)
        if prompt:
            if timings:
                self.cache_use.note(lease, timings)
                if timings.cached_tokens + timings.prompt_tokens >= TOKENS_MIN:
                    lease.finding = self._cache_findings.find(lease, timings, completed.reply)
            self.cache.record(name, prompt, lease.expected_cached, timings, completed.reply)
            if lease.upstream.node is None and self.cache.digests.is_read:
                self.cache.digests.note(
                    name, request.model, request.client, prompt, completed.reply
                )
        if timings:
            is_apart = request.owner.is_alone or lease.is_cache_off
            if is_apart and lease.owners:
                lease.owners.end(request.owner, lease.id_slot)
            if prompt and lease.slot:
                self._record_slot(lease, lease.slot, prompt, timings, completed.reply)

    async def _acquire(self, queue: ModelQueue, queued: QueuedRequest, load: Load | None) -> Lease:
        """Return the lease of a request that may have to wait, or takes no slot."""
        request, avoid = queued.request, queued.avoid
        if not request.may_load:
            load = None
            if not queue.serves(request):
                raise NotLoaded(
                    f"{request.model} is not loaded, and this request does not load it; send a "
                    f"completion request, or run `corral load {request.model}`"
                )
        if request.kind.takes_slot:
            return await queue.acquire(queued, load)
        await queue.ensure_serving(request, load)
        answering = self.registry.of_model(request.model).answering
        instances = [instance for instance in answering if instance.may_take(request)]
        fresh = [instance for instance in instances if instance.upstream.name not in avoid]

        def order(instance: RoutingTarget) -> tuple[bool, bool, float, float]:
            load = len(instance.in_flight) / instance.upstream.slots
            return instance.is_spare, instance.upstream.is_on_trial, load, instance.turn

        return Lease(request, min(fresh or instances, key=order), self._clock)

    def _record_slot(
        self,
        lease: Lease,
        slot: Slot,
        prompt: Prompt,
        timings: Timings,
        reply: Mapping[str, Any] | None,
    ) -> None:
        name = lease.upstream.name
        if lease.restored_tokens and lease.id_slot is not None:
            self.signals.restore_verified(name, lease.restored_tokens, timings)
        if lease.conversation:
            held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
            slot_map = self.cache.slot_maps[name]
            if slot_map.host_cache:
                slot_map.host_cache.note_found(lease.conversation, timings.cached_tokens)
            slot_map.release(lease, self._clock())
            if lease.has_own_slot and 2 * timings.cached_tokens < lease.expected_cached:
                slot_map.note_task()  # unexpected content: maybe in others, too
            slot_map.set_conversation(slot, lease.conversation, held, prompt.blocks)
            if lease.upstream.cache_key and (file := self._saver.note_turn(lease, timings)):
                self.signals.file_outdated(file)
            if reply and "tools" in lease.request.json:
                self.queues[lease.request.model].holds.begin(lease, held, called_tools(reply))
            if reply and (ahead := self.next_turns.note_turn(lease, timings, reply)):
                lease.finding = lease.finding and lease.finding._replace(ahead=ahead)

    def _record_part(self, lease: Lease, unfinished: Unfinished, held: Iterable[int]) -> None:
        """Note what a slot holds whose request yielded it: its prompt, and the answer so far."""
        request, conversation, slot = lease.request, lease.conversation, lease.slot
        prompt, name = request.prompt, lease.upstream.name
        if prompt is None or conversation is None or slot is None:
            return
        conversation.is_paused, conversation.paused_save_s = True, 0.0
        tokens, _ = cut_off_tokens(lease.progress, held)
        held_tokens = tokens.prompt + tokens.cached + max(0, tokens.decoded - 1)
        if unfinished.text:
            members = with_answer(request.kind, request.json, unfinished.text)
            whole = read_prompt(request.kind, request.model, members, request.owner) or prompt
            self.cache.add_turn(conversation, whole)
            blocks = whole.blocks
        else:
            share = held_tokens / max(1, lease.progress.prompt_total)
            blocks = prompt.blocks[: int(share * len(prompt.blocks))]
        self.cache.slot_maps[name].set_conversation(slot, conversation, held_tokens, blocks)

    def _release(self, lease: Lease, held: Iterable[int] = ()) -> None:
        """Free one slot, and report its use; `held` are the tokens in idle slots."""
        if lease.owners:
            lease.owners.note_release(lease)
        if lease.is_taken:
            lease.is_taken = False
            use = slot_use(lease, 1 + len(lease.beside), held)
            self.signals.slots_freed(lease, use)
            if self.signals.charged and use.client and not lease.request.is_background:
                self.signals.charged(use.client, use.tokens.total)
        self.queues[lease.request.model].release(lease)
        lease.instance.note_placed()
        if lease.place and isinstance(lease.cut_by, SlotYielded):
            lease.cut_by.note_stopped(self._clock())
            self._record_part(lease, lease.cut_by.unfinished, held)
        if self.next_turns.due:
            self.next_turns.note_end(lease.instance)
        if lease.upstream.cache_key:
            self._saver.note_end(lease.instance)

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
        self.signals.overdue(lease.upstream, reason)
