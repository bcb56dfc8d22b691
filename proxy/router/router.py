"""Which instance answers which request.

An instance has as many leases as slots, so no request waits inside an engine. A request that finds
no free slot, or no instance, waits in the queue of its model. A withdrawn instance gets no new
leases and keeps those it has. State changes only in methods without `await`.

A background lease is for work of our own, which gives way to clients. A prompt is prefilled with a
lease, as for a client: no request waits inside the engine, and what is known of its slots stays
true. It waits behind every client and ends when one needs the instance: an engine with two prompts
computes the second after the first.
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
from proxy.router.acquire import Leases, Loader
from proxy.router.cache_use import CacheContents, CacheUse, cache_contents
from proxy.router.choose_slot import HandOver, SlotSelector
from proxy.router.crash_suspects import CrashSuspects
from proxy.router.first_byte import FirstByteMonitor, Responds, answers_health
from proxy.router.forecast import EngineWork
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
from proxy.router.reports import NO_LISTENER, RouterListener, SlotUse
from proxy.router.slot_saver import SlotFiller, SlotSaver, SlotWriter
from proxy.router.workload import EstimatedWork
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Upstream

_PATIENCE_S: Final = 5.0

IsPreempted = Callable[[], bool]


@asynccontextmanager
async def background_lease(router: Router, name: str) -> AsyncIterator[IsPreempted]:
    """Hold a slot of one instance; the block gets a function that returns whether to leave.

    Raises:
        UpstreamShutDown: It is not in service, or was stopped.
        ProxyError: No slot was free in five seconds.
    """
    instances = {instance.upstream.name: instance.upstream for instance in router.instances()}
    ours = instances.pop(name, None)
    if ours is None:
        raise UpstreamShutDown(name)
    async with router.lease(_request(ours), instances) as lease:
        if lease.upstream.name != name:
            router.finish(lease)
            raise UpstreamShutDown(name)
        yield lambda: _is_wanted(router, lease)
        router.finish(lease)


def _is_wanted(router: Router, lease: Lease) -> bool:
    name, model = lease.upstream.name, lease.upstream.model
    waiting = router.demand(model).waiting
    return waiting > 0 or router.count_in_flight(name) > 1 or not lease.instance.in_service


def _request(upstream: Upstream) -> ProxyRequest:
    """Return a request that, like a forwarded one, stays here and loads nothing."""
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
        emit: Takes `upstream.failed` where an engine does not free a slot.
        storage: Keeps KV caches on disk.
        count: Queries how many slots of an instance are in use; None for the usual way.
        responds: Queries whether an instance responds; None for the usual way.

    Attributes:
        saves_skipped: How many conversations were not saved, by model and reason.
    """

    def __init__(  # noqa: PLR0913 (its neighbours, and three for tests)
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        listener: RouterListener = NO_LISTENER,
        emit: Emit = discard,
        storage: SlotFileStorage = NO_SLOT_FILES,
        *,
        clock: Clock = time.monotonic,
        count: CountBusySlots | None = None,
        responds: Responds | None = None,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._emit = emit
        self._storage = CountedStorage(storage, self._model_of)
        self._clock = clock
        self._instances = Instances(clock, route_by_speed=settings.route_by_speed)
        self._prefix_index = PrefixIndex(settings.prefix_index_max_blocks, clock)
        self._crash_suspects = CrashSuspects(clock, settings.crash_memory_s)
        self._queues = ModelQueues(
            self._instances, self._prefix_index, settings, clock, listener.idle
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
            listener,
            self._crash_suspects,
            self._slot_releaser,
            self._first_byte_monitor,
            SlotSelector(self._prefix_index, settings, filler, self._hand_over),
            self._slot_writer.request_ended,
        )

    # Called by the supervisor and the nodes.

    def admit(self, upstream: Upstream, filled: Iterable[RestoredSlot] = ()) -> None:
        """Route requests to an instance; `filled` are its slots as its process began with them."""
        self._prefix_index.register(upstream, filled)
        self._instances.admit(upstream, self._prefix_index.bit(upstream.name))
        self._queues.of(upstream.model).admitted()

    def withdraw(self, name: str) -> None:
        """Route no more requests to an instance; those that it holds continue."""
        if instance := self._instances.get(name):
            self._instances.withdraw(instance)
            self._queues.of(instance.upstream.model).withdrawn(instance)

    def serves(self, model: str) -> bool:
        """Return whether an instance of the model is in service."""
        return bool(self._instances.in_service(model))

    def count_in_flight(self, name: str) -> int:
        return self.activity(name).in_flight

    def activity(self, name: str) -> Activity:
        """Return the requests of an instance; cheap enough for several calls a second."""
        instance = self._instances.get(name)
        return instance.activity if instance else Activity()

    def note_end(self, name: str, process_exit: ProcessExit, *, reason: str = "") -> int:
        """Note that a process ended that was admitted with `reports_exit`, before it is withdrawn.

        Args:
            name: The instance.
            process_exit: How it ended.
            reason: Why it ended, for clients whose answers it cuts; empty: they are not told.

        Returns:
            How many requests of clients it computed, including those whose clients have left.
        """
        self._prefix_index.note_end(name, has_failed=process_exit is not ProcessExit.STOPPED)
        instance = self._instances.get(name)
        leases = {*instance.in_flight, *instance.ending} if instance else set()
        for lease in leases:
            lease.set_process_exit(process_exit, reason)
        # One request may hold several slots.
        requests = {
            id(lease.request): lease.request
            for lease in leases
            if not (lease.request.is_background or lease.is_unsent)
        }
        if process_exit is ProcessExit.CRASHED:
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

    def forget(self, name: str) -> bool:
        """Forget an instance that does not come back; return False while it holds a request."""
        if self._instances.get(name):
            return False
        self._instances.forget(name)
        self._prefix_index.forget(name)
        return True

    def pause(self, model: str) -> None:
        """Queue all requests for a model, even where a slot is free."""
        self._queues.of(model).is_paused = True

    def resume(self, model: str) -> None:
        queue = self._queues.of(model)
        queue.is_paused = False
        queue.assign_slots()

    def demand(self, model: str) -> ModelDemand:
        return demand_of(self._queues.of(model), self._instances, self._prefix_index)

    def prefix_digest(
        self, cursor: str, client: str | None, models: Iterable[str]
    ) -> Digest | None:
        """Return what the caches here hold of a client's prompts, as `PrefixDigests.after` does."""
        return self._prefix_index.digests.after(cursor, client, models)

    def add_remote_prefixes(self, upstream: Upstream, hashes: Iterable[int]) -> None:
        """Note the hashes of a digest, which a node's model is said to hold."""
        named = (toggle_model_name(digest, upstream.model) for digest in hashes)
        self._prefix_index.remote.add(upstream.name, named, self._clock())

    def forget_remote_prefixes(self, name: str) -> None:
        self._prefix_index.remote.forget(name)

    def add_slot_file(self, file: SlotFile) -> None:
        """Note that a KV cache is on disk."""
        self._prefix_index.files.add(file)
        self._hand_over.note_file()

    def remove_slot_files(self, names: Iterable[str]) -> None:
        """Note that slot files are gone."""
        self._prefix_index.files.remove(names)

    def stores_prefixes(self, model: str) -> bool:
        """Return whether instances of a model can go on from a file of a shared prefix."""
        return any(True for _ in self._storing_prefixes(model))

    def prefix_storing_instances(self, model: str, blocks: Sequence[int]) -> list[Upstream]:
        """Return those instances, the ones first that were given a prompt with these blocks."""
        holders = self._prefix_index.holders(blocks)
        found = sorted(
            self._storing_prefixes(model), key=lambda instance: not instance.bit & holders
        )
        return [instance.upstream for instance in found]

    def _storing_prefixes(self, model: str) -> Iterator[RoutingTarget]:
        runs = self._prefix_index.runs_with_files()
        found = filter(None, (self._instances.get(run.name) for run in runs))
        # A recurrent state serves only a prompt that continues all of it.
        return (
            instance
            for instance in found
            if instance.in_service
            and instance.upstream.model == model
            and instance.upstream.cache_key
            and not instance.upstream.resumable_prompts
        )

    def turns_of_request(self, request_id: str) -> Collection[int]:
        """Return what identifies a conversation by its latest request; empty where unknown."""
        found = self._prefix_index.recent.conversation_of(request_id)
        return tuple(found.turn_hashes) if found else ()

    def turns_of_conversation(self, number: int) -> Collection[int]:
        """Return the same by the number of a conversation."""
        found = self._prefix_index.recent.find_conversation(number)
        return tuple(found.turn_hashes) if found else ()

    def forget_conversations(self, turn_hashes: Collection[int]) -> ForgottenConversations:
        """Forget the conversations of these turns; their next turns begin new ones."""
        return self._prefix_index.forget_conversations(turn_hashes)

    def are_in_use(self, numbers: Collection[int]) -> bool:
        """Return whether a request in flight is of one of these conversations."""
        leases = (lease for instance in self._instances for lease in instance.leases)
        return any(lease.conversation_number in numbers for lease in leases)

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

    def conversation_owner(self, fingerprint: ConversationFingerprint) -> str | None:
        """Return the instance that has a conversation now."""
        return self._prefix_index.owner(fingerprint)

    async def run(self) -> None:
        """Free slots of aborted requests, save idle ones, watch for silent instances."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._slot_writer.run())
            group.create_task(self._first_byte_monitor.serve())
            await self._slot_releaser.run()

    def charge(self, use: SlotUse) -> None:
        """Tell what was computed for a client without a lease of its own."""
        self._listener.slots_freed(use, use)

    # Statistics.

    @property
    def cache_use(self) -> CacheUse:
        return self._leases.cache_use

    def cache_contents(self) -> Mapping[str, CacheContents]:
        """Return what the engines of each model are believed to hold."""
        return cache_contents(
            (instance.upstream for instance in self._instances), self._prefix_index
        )

    @property
    def slot_file_counts(self) -> Mapping[str, ModelCounts]:
        """What was saved and restored, by model."""
        return self._storage.counts

    def instances(self) -> tuple[InstanceStats, ...]:
        """All that are in service or hold something."""
        models = {instance.upstream.model for instance in self._instances}
        counts = {model: self._prefix_index.conversations_per_instance(model) for model in models}
        weights = {model: self._instances.of(model).weights for model in models}
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
        """Return the place of each waiting request in its queue by its client and id, from 1."""
        return self._queues.positions()

    def work(self, request: ProxyRequest, idle: Sequence[EngineWork] = ()) -> EstimatedWork:
        """Return what the instances of a model have to do, with a request that has not come.

        `idle` are the engines of a model that has none in service.
        """
        return self._queues.of(request.model).work(request, idle)

    def as_client_knows(self, request: ProxyRequest) -> ProxyRequest:
        """Return a request to be estimated by what the requests of its own key left in caches."""
        if (prompt := request.prompt) is None or not request.owner.name:
            return request
        blocks = self.own_blocks(request.model, request.client, prompt)
        return replace(request, prompt=prompt.known_to(blocks))

    def own_blocks(self, model: str, client: str, prompt: Prompt) -> int:
        """Return how many blocks of a prompt a client's own recent requests begin with."""
        return self._prefix_index.recent.own_blocks(client_hash(model, client), prompt)

    def measures(self, model: str) -> ModelMeasures:
        """Return what is measured of a model's engines."""
        return self._queues.of(model).measures

    # A request.

    def lease(
        self, request: ProxyRequest, avoid: Collection[str] = (), loader: Loader | None = None
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold one slot of an instance for the length of the block, as `Leases.lease` says."""
        return self._leases.lease(request, avoid, loader)

    def note_chunk(self, lease: Lease) -> None:
        """Note that one more request for a lease is sent now, to compute a part of its prompt."""
        self._leases.note_chunk(lease)

    async def send_again(self, lease: Lease) -> None:
        """Return once the request may be sent once more, after a whole response to it."""
        await self._leases.send_again(lease)

    def finish(self, lease: Lease, completed: Completion | None = None) -> None:
        """Free the slots of a complete response, and learn from it.

        `completed` is None where the request was refused.
        """
        self._leases.finish(lease, completed)

    def _model_of(self, name: str) -> str | None:
        instance = self._instances.get(name)
        return instance.upstream.model if instance else None

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
