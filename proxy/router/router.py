"""The router: which instance answers which request.

An instance has as many leases as slots, so no request waits inside an engine. A request that finds
no free slot, or no instance, waits in the queue of its model. A withdrawn instance gets no new
leases and keeps those it has. State changes only in methods without `await`.

A background lease is for work of our own, such as the prefill of a prompt. It takes a slot like a
client's request, so the tracked contents of slots stay correct. It waits behind every client, and
ends when a client needs the instance, because an engine computes two prompts one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Final

from multidict import CIMultiDict

from proxy.cache.conversations import ForgottenConversations
from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot, SlotFile
from proxy.cache.index import PrefixIndex
from proxy.cache.miss_cause import client_hash
from proxy.cache.prompt import Prompt, toggle_model_name
from proxy.cache.remote_prefixes import Digest
from proxy.cache.save_policy import NO_SLOT_FILES, CountedStorage, ModelCounts, SlotFileStorage
from proxy.errors import UpstreamShutDown
from proxy.observe.cache_finding import NoFile
from proxy.observe.record import Emit, discard
from proxy.request.request import ProxyRequest
from proxy.router.acquire import CrashSuspects, Leases, Load
from proxy.router.cache_use import CacheContents, CacheUse, cache_contents
from proxy.router.choose_slot import HandOver, SlotSelector
from proxy.router.first_byte import FirstByteMonitor, Responds, answers_health
from proxy.router.lease import (
    Activity,
    Clock,
    Completion,
    InstanceStats,
    Lease,
    ProcessExit,
    RoutingTarget,
)
from proxy.router.measures import ModelMeasures
from proxy.router.model_queue import ModelDemand, ModelQueues, demand_of
from proxy.router.policy import EQUAL
from proxy.router.queue import QueueStats
from proxy.router.registry import Instances
from proxy.router.release import CountBusySlots, SlotContents, SlotReleaser, slots_in_use
from proxy.router.reports import RouterSignals, SlotUse
from proxy.router.slot_saver import SlotFiller, SlotSaver, SlotWriter
from proxy.router.workload import WorkReader
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Upstream

_PATIENCE_S: Final = 5.0

IsPreempted = Callable[[], bool]


@asynccontextmanager
async def background_lease(router: Router, name: str) -> AsyncIterator[IsPreempted]:
    """See `Router.background_lease`."""
    instances = {instance.upstream.name: instance.upstream for instance in router.instances()}
    ours = instances.pop(name, None)
    if ours is None:
        raise UpstreamShutDown(name)
    async with router.lease(_background_request(ours), instances) as lease:
        if lease.upstream.name != name:
            router.finish(lease)
            raise UpstreamShutDown(name)

        def is_preempted() -> bool:
            is_wanted = router.demand(ours.model).waiting > 0 or router.count_in_flight(name) > 1
            return is_wanted or not lease.instance.in_service

        yield is_preempted
        router.finish(lease)


def _background_request(upstream: Upstream) -> ProxyRequest:
    """Return a request that stays on this machine and loads nothing, like a forwarded one."""
    return ProxyRequest(
        request_id=f"warm-{upstream.name}",
        method="POST",
        path="/v1/chat/completions",
        query="",
        headers=CIMultiDict(),
        body=b"",
        json={},
        kind=EndpointKind.CHAT,
        model=upstream.model,
        client="",
        priority="batch",
        queue_timeout_s=_PATIENCE_S,
        is_from_proxy=True,
        is_background=True,
    )


class Router:
    """The instances, and the requests that they answer or that wait for them.

    The name of an unknown instance or model is not an error.

    Args:
        emit: Emits `upstream.failed` if an engine does not free a slot.
        count: Counts the busy slots of an instance; None: by its `/slots`.
        responds: Returns whether an instance responds; None: by its `/health`.

    Attributes:
        saves_skipped: The number of conversations that were not saved, by model and reason.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        emit: Emit = discard,
        *,
        clock: Clock = time.monotonic,
        count: CountBusySlots | None = None,
        responds: Responds | None = None,
    ) -> None:
        self._settings = settings
        self.signals = RouterSignals()
        self._emit = emit
        self._storage = CountedStorage()
        self._clock = clock
        self._instances = Instances(clock, route_by_speed=settings.route_by_speed)
        self._prefix_index = PrefixIndex(settings.prefix_index_max_blocks, clock)
        self._crash_suspects = CrashSuspects(clock, settings.crash_memory_s)
        self._queues = ModelQueues(
            self._instances, self._prefix_index, settings, clock, self.signals.idle
        )
        contents = SlotContents(clock)
        self._slot_releaser = SlotReleaser(
            count or slots_in_use(settings, contents),
            clock,
            settings.cancel_timeout_s,
            self._report_overdue,
            contents,
        )
        self._first_byte_monitor = FirstByteMonitor(
            self._instances, responds or answers_health(settings), self._queues.assign_slots
        )
        saver = SlotSaver(self._prefix_index, settings, self._storage, clock)
        self._hand_over = HandOver(self._prefix_index, self._instances)
        self.saves_skipped: Mapping[tuple[str, NoFile], int] = saver.skipped
        filler = SlotFiller(self._prefix_index, self._storage, saver)
        self._slot_writer = SlotWriter(
            self._prefix_index, saver, lambda upstream: get_slots(upstream, settings), clock
        )
        self._leases = Leases(
            self._queues,
            self.signals,
            self._crash_suspects,
            self._slot_releaser,
            self._first_byte_monitor,
            SlotSelector(self._prefix_index, settings, filler, self._hand_over),
            self._slot_writer.note_end,
        )

    # Called by the supervisor and the nodes.

    def admit(
        self,
        upstream: Upstream,
        filled: Iterable[RestoredSlot] = (),
        storage: SlotFileStorage = NO_SLOT_FILES,
    ) -> None:
        """Route requests to an instance.

        `filled` are the slots that its process restored; `storage` stores its slots on disk.
        """
        self._storage.add(upstream.name, upstream.model, storage)
        self._prefix_index.register(upstream, filled)
        self._instances.admit(upstream, self._prefix_index.bit(upstream.name))
        self._queues.queue_of(upstream.model).note_admission()

    def withdraw(self, name: str) -> None:
        """Route no more requests to an instance; those in flight continue."""
        if instance := self._instances.get(name):
            self._instances.withdraw(instance)
            self._queues.queue_of(instance.upstream.model).note_withdrawal(instance)

    def serves(self, model: str) -> bool:
        return bool(self._instances.in_service(model))

    def count_in_flight(self, name: str) -> int:
        return self.activity(name).in_flight

    def activity(self, name: str) -> Activity:
        """Return the requests of an instance; cheap enough for several calls a second."""
        instance = self._instances.get(name)
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
        self._prefix_index.note_end(name, has_failed=process_exit is not ProcessExit.STOPPED)
        instance = self._instances.get(name)
        leases = {*instance.in_flight, *instance.ending} if instance else set()
        for lease in leases:
            lease.set_process_exit(process_exit, reason)
        # A request may hold several slots.
        requests = {
            id(lease.request): lease.request
            for lease in leases
            if not (lease.request.is_background or lease.is_unsent)
        }
        if process_exit is ProcessExit.CRASHED:
            self._crash_suspects.note_crash(requests.values())
        return len(requests)

    async def wait_idle(self, name: str) -> None:
        """Wait until an instance holds no request. The wait has no limit; `close` ends it."""
        if instance := self._instances.get(name):
            await instance.in_flight.wait_empty()

    async def close(self, name: str) -> None:
        """Withdraw an instance, abort its requests, and wait until their connections are closed."""
        instance = self._instances.get(name)
        self.withdraw(name)
        if instance:
            instance.in_flight.abort(UpstreamShutDown(name))
            await instance.in_flight.wait_empty()

    def forget(self, name: str) -> bool:
        """Forget an instance for good; return False if it still holds a request."""
        if self._instances.get(name):
            return False
        self._instances.forget(name)
        self._prefix_index.forget(name)
        self._storage.forget(name)
        return True

    def pause(self, model: str) -> None:
        """Queue all requests for a model, even if a slot is free."""
        self._queues.queue_of(model).is_paused = True

    def resume(self, model: str) -> None:
        queue = self._queues.queue_of(model)
        queue.is_paused = False
        queue.assign_slots()

    def demand(self, model: str) -> ModelDemand:
        return demand_of(self._queues.queue_of(model), self._instances, self._prefix_index)

    def prefix_digest(
        self, cursor: str, client: str | None, models: Iterable[str]
    ) -> Digest | None:
        """Return hashes of a client's prompts in the caches here; see `PrefixDigests.after`."""
        return self._prefix_index.digests.after(cursor, client, models)

    def add_remote_prefixes(self, upstream: Upstream, hashes: Iterable[int]) -> None:
        """Note the hashes of prompts that a node reports for its model."""
        named = (toggle_model_name(digest, upstream.model) for digest in hashes)
        self._prefix_index.remote.add(upstream.name, named, self._clock())

    def forget_remote_prefixes(self, name: str) -> None:
        self._prefix_index.remote.forget(name)

    def add_slot_file(self, file: SlotFile) -> None:
        self._prefix_index.files.add(file)
        self._hand_over.note_file()

    def remove_slot_files(self, names: Iterable[str]) -> None:
        self._prefix_index.files.remove(names)

    def stores_prefixes(self, model: str) -> bool:
        """Return whether an instance of a model can restore a file of a shared prefix."""
        return any(True for _ in self._storing_prefixes(model))

    def prefix_storing_instances(self, model: str, blocks: Sequence[int]) -> list[Upstream]:
        """Return such instances, those first that hold a prompt with these blocks."""
        holders = self._prefix_index.holders(blocks)
        found = sorted(
            self._storing_prefixes(model), key=lambda instance: not instance.bit & holders
        )
        return [instance.upstream for instance in found]

    def _storing_prefixes(self, model: str) -> Iterator[RoutingTarget]:
        runs = self._prefix_index.runs_with_files()
        found = filter(None, (self._instances.get(run.name) for run in runs))
        # A recurrent state can only be used by a prompt that continues all of it.
        return (
            instance
            for instance in found
            if instance.in_service
            and instance.upstream.model == model
            and instance.upstream.cache_key
            and not instance.upstream.resumable_prompts
        )

    def turns_of_request(self, request_id: str) -> Collection[int]:
        """Return the turn hashes of the conversation of a request; empty if unknown."""
        found = self._prefix_index.recent.conversation_of(request_id)
        return tuple(found.turn_hashes) if found else ()

    def turns_of_conversation(self, number: int) -> Collection[int]:
        """Return the turn hashes of a conversation by its number; empty if unknown."""
        found = self._prefix_index.recent.find_conversation(number)
        return tuple(found.turn_hashes) if found else ()

    def forget_conversations(self, turn_hashes: Collection[int]) -> ForgottenConversations:
        """Forget the conversations of these turns; their next turns begin new ones."""
        return self._prefix_index.forget_conversations(turn_hashes)

    def are_in_use(self, numbers: Collection[int]) -> bool:
        leases = (lease for instance in self._instances for lease in instance.leases)
        return any(lease.conversation_number in numbers for lease in leases)

    def background_lease(self, name: str) -> AbstractAsyncContextManager[IsPreempted]:
        """Hold a slot of one instance for work of our own.

        The block gets a function that returns True once a client needs the slot, or the instance is
        withdrawn; the block must then end soon.

        Raises:
            UpstreamShutDown: The instance is not in service, or was stopped.
            ProxyError: No slot was free within 5 s.
        """
        return background_lease(self, name)

    def conversation_fingerprints(
        self, name: str, listed: Sequence[SlotState]
    ) -> Mapping[int, ConversationFingerprint]:
        """Return the conversations in an instance's idle slots; `listed` is its /slots now."""
        return self._prefix_index.fingerprints(name, listed, self._clock())

    def conversation_owner(self, fingerprint: ConversationFingerprint) -> str | None:
        return self._prefix_index.owner(fingerprint)

    async def run(self) -> None:
        """Free slots of aborted requests, save idle slots, and watch for silent instances."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slot_writer.run())
            group.create_task(self._first_byte_monitor.serve())
            await self._slot_releaser.run()

    def charge(self, use: SlotUse) -> None:
        """Report tokens that were computed for a client without a lease of its own."""
        self.signals.slots_freed(use, use)

    # Statistics.

    @property
    def cache_use(self) -> CacheUse:
        return self._leases.cache_use

    def cache_contents(self) -> Mapping[str, CacheContents]:
        return cache_contents(
            (instance.upstream for instance in self._instances), self._prefix_index
        )

    @property
    def slot_file_counts(self) -> Mapping[str, ModelCounts]:
        return self._storage.counts

    def instances(self) -> tuple[InstanceStats, ...]:
        """Return the instances that are in service or hold requests."""
        models = {instance.upstream.model for instance in self._instances}
        counts = {model: self._prefix_index.conversations_per_instance(model) for model in models}
        weights = {model: self._instances.of_model(model).weights for model in models}
        return tuple(
            instance.stats(
                counts[instance.upstream.model].get(instance.upstream.name, 0),
                weights[instance.upstream.model].get(instance.upstream.name, EQUAL),
            )
            for instance in self._instances
        )

    def queues(self) -> Mapping[str, QueueStats]:
        return self._queues.stats()

    def queue_positions(self) -> Mapping[tuple[str, str], int]:
        """Return each waiting request's place in its queue, from 1, by client and request id."""
        return self._queues.positions()

    def work_reader(self, model: str) -> WorkReader:
        return self._queues.queue_of(model).reader

    def as_client_knows(self, request: ProxyRequest) -> ProxyRequest:
        """Return a request for an estimate that uses only cache content of its own key."""
        if (prompt := request.prompt) is None or not request.owner.name:
            return request
        blocks = self.own_blocks(request.model, request.client, prompt)
        return replace(request, prompt=prompt.known_to(blocks))

    def own_blocks(self, model: str, client: str, prompt: Prompt) -> int:
        """Return the number of blocks with which a recent request of the client also began."""
        return self._prefix_index.recent.own_blocks(client_hash(model, client), prompt)

    def measures(self, model: str) -> ModelMeasures:
        return self._queues.queue_of(model).measures

    # A request.

    def lease(
        self, request: ProxyRequest, avoid: Collection[str] = (), load: Load | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """See `Leases.lease`."""
        return self._leases.lease(request, avoid, load)

    def note_chunk(self, lease: Lease) -> None:
        """See `Leases.note_chunk`."""
        self._leases.note_chunk(lease)

    async def send_again(self, lease: Lease) -> None:
        """See `Leases.send_again`."""
        await self._leases.send_again(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """See `Leases.finish`."""
        self._leases.finish(lease, completed)

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
