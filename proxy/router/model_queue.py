"""The queue of each model: when a request gets which slot. No I/O, no waiting.

While an interactive request waits and no slot is free, a batch request yields its slot: the one
whose handover wastes the least time. `Forward` continues its answer when it gets a slot again. All
handovers of one request may waste a tenth of the time for which it holds slots, and a little at its
beginning, so that batches make progress however often interactive requests come.

Every event that may let a request in calls `assign_slots`: while a slot is free, the requests in
the queue choose in order (`queue`). A request that prefers to wait for the owner of its
conversation, or for another prompt, keeps its place and delays no request behind it. Only the end
of such a wait is no event; it has a timer.
"""

from __future__ import annotations

import asyncio
import math
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

from attrs import define, field

from proxy.cache.index import PrefixIndex
from proxy.cache.save_policy import SlotFileMeasures
from proxy.cache.slot_map import SlotMap
from proxy.errors import (
    ModelLoading,
    ProxyError,
    QueueFull,
    QueueTimeout,
    Unavailable,
)
from proxy.request.request import ProxyRequest
from proxy.router.lease import Clock, Lease, RoutingTarget, SlotYielded
from proxy.router.queue import QueuedRequest, QueueStats, RequestQueue, SlotAssignment
from proxy.router.registry import Instances
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Rates, Timings, average

_RECHECK_MIN_S: Final = 0.001
_RETRY_MAX_S: Final = 120
_RETRY_AFTER_LOAD_S: Final = 10

# Returns once an instance of a model is admitted; see `ModelLoader.ensure_ready`.
Load = Callable[[str], Awaitable[None]]


async def _error_of(wait: Coroutine[None, None, None]) -> ProxyError | None:
    """Return the error of a wait; raised in a task group, it would be wrapped."""
    try:
        await wait
    except ProxyError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """Clients' demand for a model on this machine."""

    waiting: int
    working: int  # Requests on its local instances, withdrawn ones included.
    idle_since_s: float  # When the last request ended; minus infinity before the first.
    cached_tokens: int  # Known tokens of conversations in its slots.
    # Waiting requests that more slots would not help: another prompt comes first.
    held_back: int = 0


# The share of its time that a request may waste by yielding, and the seconds at its beginning.
_WASTE_SHARE: Final = 0.1
_WASTE_FIRST_S: Final = 0.2
# Assumed before the first handover: the engine stops, lists its slots, and computes a token again.
_HANDOVER_S: Final = 0.05
# A request that cannot stop at this moment can do so soon, such as after its next event.
_STOPS_IN_S: Final = 0.02


def yields_in_s(ran_s: float, spent_s: float, cost_s: float) -> float:
    """Return in how many seconds a request may yield.

    Args:
        ran_s: How long it has held slots.
        spent_s: How much of that was wasted because it yielded.
        cost_s: How much is wasted if it yields now.
    """
    return max(0.0, (spent_s + cost_s - _WASTE_FIRST_S) / _WASTE_SHARE - ran_s)


def resume_s(lease: Lease, slot_map: SlotMap | None, measures: SlotFileMeasures) -> float:
    """Return the time to restore what an engine has computed for a request, or to compute it again.

    Of a recurrent state or a sliding window only all can be restored, and the engine has computed
    more than the client has.
    """
    upstream, progress, rates = lease.upstream, lease.progress, lease.instance.rates
    prompt = progress.prompt_total if progress.decoded else progress.prompt_done
    tokens = prompt + progress.decoded
    compute_s = prompt / rates.prefill_tps + progress.decoded / rates.decode_tps
    if upstream.is_all_or_nothing or slot_map is None:
        return compute_s
    if slot_map.host_cache and slot_map.host_cache.absence_probability(tokens) < 1.0:
        return 0.0
    if not upstream.cache_key:
        return compute_s
    size_bytes = tokens * upstream.token_bytes + upstream.state_bytes
    restore_s = measures.saves.duration_s(size_bytes) + measures.restores.duration_s(size_bytes)
    return min(compute_s, restore_s)


@define(eq=False, slots=False)
class ModelQueue:
    model: str
    _instances: Instances
    _prefix_index: PrefixIndex
    _settings: ProxySettings
    _clock: Clock
    _on_idle: Callable[[], None]
    admissions: int = field(default=0, init=False)  # The number of admissions of instances.
    is_paused: bool = field(default=False, init=False)  # All requests wait, even if a slot is free.
    # When a local instance last ended a client's request; minus infinity before the first.
    ended_at_s: float = field(default=-math.inf, init=False)
    # Those of the instance that responded last; they outlive it.
    rates: Rates | None = field(default=None, init=False)
    # Slots that batch requests gave up and whose answers go on, and the time that took, measured.
    handovers: int = field(default=0, init=False)
    handovers_s: float = field(default=0.0, init=False)
    # Of the next one, without restoring and computing.
    _fixed_s: float = field(default=_HANDOVER_S, init=False)
    _granted: dict[Lease, QueuedRequest] = field(factory=dict, init=False)
    _recheck: asyncio.TimerHandle | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._queue = RequestQueue(self.model, self._settings)
        self._assignment = SlotAssignment(
            self._queue, self._instances, self._prefix_index, self._clock, self.assign_slots
        )
        self.times = self._assignment.times
        self.holds = self._assignment.holds

    # Waiting.

    def lease_now(self, queued: QueuedRequest) -> Lease | None:
        """Lease a slot to a request that need not wait."""
        if not queued.request.kind.takes_slot or self.is_paused or self._queue.count:
            return None
        if not self._assignment.lease_only(queued):
            self._assignment.assign((queued,))
        return queued.lease

    async def acquire(self, queued: QueuedRequest, load: Load | None) -> Lease:
        """Lease a slot of an instance after a wait in the queue.

        Raises:
            QueueFull: Too many requests wait already.
            QueueTimeout: No slot became free in time.
            ModelLoading: No instance was ready in time.
            Unavailable: No instance is or will be ready; or the errors of `load`.
        """
        try:
            self._join(queued)
            if queued.lease is None:
                async with self._deadline(queued.request, is_limited=queued.yielded is None):
                    await self._wait(queued, load)
            assert queued.lease is not None  # noqa: S101 (for the type: it waited for one)
            self._granted.pop(queued.lease, None)
            return queued.lease
        finally:
            self._remove(queued)

    async def ensure_serving(self, request: ProxyRequest, load: Load | None) -> None:
        """Return once an instance is ready; raises the errors of `acquire`."""
        if not self.serves(request):
            async with self._deadline(request):
                while not self.serves(request):
                    await self._load(request, load)

    async def _wait(self, queued: QueuedRequest, load: Load | None) -> None:
        while queued.lease is None:
            queued.wake.clear()
            if self.serves(queued.request):
                await queued.wake.wait()
            else:
                await self._load_unless_assigned(queued, load)

    async def _load_unless_assigned(self, queued: QueuedRequest, load: Load | None) -> None:
        async with asyncio.TaskGroup() as first:
            woken = first.create_task(queued.wake.wait())
            loading = first.create_task(_error_of(self._load(queued.request, load)))
            await asyncio.wait((woken, loading), return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
            loading.cancel()
        error = None if loading.cancelled() else loading.result()
        if error and queued.lease is None:
            raise error

    async def _load(self, request: ProxyRequest, load: Load | None) -> None:
        """Load the model, unless another proxy forwarded the request and can use other machines."""
        before = self.admissions
        if load and not request.is_from_proxy:
            await load(self.model)
        if not self.serves(request) and self.admissions == before:
            raise Unavailable(f"no instance of {self.model} is ready; retry later")

    @asynccontextmanager
    async def _deadline(
        self, request: ProxyRequest, *, is_limited: bool = True
    ) -> AsyncIterator[None]:
        limit = asyncio.timeout(request.queue_timeout_s if is_limited else None)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            if not self.serves(request):
                sentence = f"{self.model} is still loading; retry later"
                raise ModelLoading(sentence, _RETRY_AFTER_LOAD_S) from None
            waited = f"timed out after {request.queue_timeout_s:g} s waiting for a free slot"
            sentence = f"{waited} of {self.model}; retry later"
            raise QueueTimeout(sentence, self.retry_after_s) from None

    def _join(self, queued: QueuedRequest) -> None:
        """Put a request that found no slot into the queue; raises QueueFull."""
        queued.new_tokens = self._assignment.new_tokens(queued)
        queued.owner = self._assignment.owner(queued)
        self._queue.join(queued)
        self.assign_slots()
        if queued.lease is not None:
            return
        queued.position = self._queue.position(queued, self._clock())
        is_let_in = queued.request.is_let_in or queued.yielded
        if self._queue.is_full(queued.request.priority) and not is_let_in:
            self._queue.leave(queued)
            ahead = self._queue.waiting(queued.request.priority)
            reason = f"{ahead} requests wait for {self.model} already; retry later"
            raise QueueFull(reason, self.retry_after_s)

    def _remove(self, queued: QueuedRequest) -> None:
        """Remove a request, and free a slot that it was granted but does not use."""
        self._queue.leave(queued)
        if queued.lease in self._granted:
            for lease in queued.lease.slots:
                self.release(lease)
        elif queued.lease is None and queued.request.slots > 1:
            self.assign_slots()  # slots may have been reserved for it

    @property
    def retry_after_s(self) -> int:
        """Whole seconds after which a retry is worthwhile, 1 to 120."""
        return min(max(1, math.ceil(self._expected_wait_s)), _RETRY_MAX_S)

    def stats(self) -> QueueStats:
        in_service = self._instances.in_service(self.model)
        has_room = any(self.holds.free_slots(instance) > 0 for instance in in_service)
        return self._queue.stats(self._clock(), 0.0 if has_room else self._expected_wait_s)

    def positions(self) -> dict[tuple[str, str], int]:
        order = enumerate(self._queue.order(self._clock()), 1)
        return {(entry.request.client, entry.request.request_id): number for number, entry in order}

    def paused(self) -> list[tuple[ProxyRequest, float]]:
        """Return the requests that wait to go on, with the time since they gave up their slots."""
        now_s = self._clock()
        order = self._queue.order(now_s)
        return [(entry.request, now_s - entry.yielded.at_s) for entry in order if entry.yielded]

    @property
    def waiting(self) -> int:
        return self._queue.count

    def place(self, queued: QueuedRequest) -> int:
        """Return the place, from 0, that a request would have if it joined now."""
        queued.new_tokens = self._assignment.new_tokens(queued)
        in_queue = self._queue.order_with(queued, self._clock())
        return [*self._assignment.order(in_queue)].index(queued)

    @property
    def _expected_wait_s(self) -> float:
        slots = self._instances.of_model(self.model).slots
        return self.times.wait_s(self._queue.count, slots)

    # Instances.

    def serves(self, request: ProxyRequest) -> bool:
        return any(
            instance.may_take(request) for instance in self._instances.in_service(self.model)
        )

    def note_admission(self) -> None:
        self.admissions += 1
        self.assign_slots()

    def note_withdrawal(self, instance: RoutingTarget) -> None:
        """Put requests that were granted a slot of a withdrawn instance back into the queue."""
        self.holds.forget(instance)
        for lease in tuple(instance.leases):
            if queued := self._granted.pop(lease, None):
                for slot_lease in lease.slots:
                    instance.drop(slot_lease)
                queued.lease = None
                queued.wake.clear()
                self._queue.join(queued)
            elif lease.is_ending:
                instance.drop(lease)
        self._instances.discard_if_unused(instance)
        self.assign_slots()
        for queued in self._queue.order(self._clock()):
            if not self.serves(queued.request):
                queued.wake.set()

    def release(self, lease: Lease) -> None:
        """Free a slot, if it is in use, and grant it to the next request."""
        self._granted.pop(lease, None)
        if lease in lease.instance.leases:
            lease.instance.drop(lease)
            if lease.slot:
                self._prefix_index.slot_maps[lease.upstream.name].release(lease, self._clock())
            if not lease.instance.in_service:
                self._instances.discard_if_unused(lease.instance)
            if not (lease.upstream.node or lease.request.is_background):
                self.ended_at_s = self._clock()
            self._assignment.note_ended(lease.request)
            if lease.yielded:
                self._note_handover(lease, lease.yielded)
            if self._queue.count:
                self.assign_slots()
            if not next(self._client_leases(), None):
                self._on_idle()

    def demand(self) -> ModelDemand:
        instances = self._instances.in_service(self.model)
        slot_maps = (self._prefix_index.slot_maps[instance.upstream.name] for instance in instances)
        return ModelDemand(
            waiting=self._queue.count,
            working=sum(1 for _ in self._client_leases()),
            idle_since_s=self.ended_at_s,
            cached_tokens=sum(slot_map.tokens for slot_map in slot_maps),
            held_back=self._queue.count if self._assignment.is_beside_free_slot() else 0,
        )

    def _client_leases(self) -> Iterator[Lease]:
        for instance in self._instances.local:
            if instance.upstream.model == self.model:
                for lease in instance.leases:
                    if not lease.request.is_background:
                        yield lease

    def note_finished(self, lease: Lease, timings: Timings | None) -> None:
        instance, now_s = lease.instance, self._clock()
        if timings and not (timings.prompt_ms or timings.decode_ms):
            timings = with_times(timings, lease, now_s)
        self.times.note(now_s - lease.began_at_s, timings)
        if timings:
            sequences = (lease.sequences + len(instance.leases) + 1) // 2
            self.rates = instance.rates.after(timings, sequences, now_s)
            instance.set_rates(self.rates)

    # Granting slots.

    def assign_slots(self) -> None:
        if self._recheck:
            self._recheck.cancel()
            self._recheck = None
        while self._queue.count and not self.is_paused:
            entries = self._assignment.order(self._queue.order(self._clock()))
            queued = self._assignment.assign(entries)
            if queued is None or queued.lease is None:
                recheck_in_s = min(self._assignment.recheck_in_s, self._make_room())
                if recheck_in_s < math.inf:
                    loop = asyncio.get_running_loop()
                    self._recheck = loop.call_later(
                        max(recheck_in_s, _RECHECK_MIN_S), self.assign_slots
                    )
                return
            self._granted[queued.lease] = queued
            queued.wake.set()
            self._queue.take(queued)

    def _make_room(self) -> float:
        """Let batch requests yield while interactive ones wait and no slot is free.

        Returns the seconds until another one may; infinity if that is not known or not needed.
        """
        of_model = self._instances.of_model(self.model)
        wanted = self._queue.slots_wanted("interactive")
        if not wanted or any(self.holds.free_slots(free) > 0 for free in of_model.answering):
            return math.inf
        leases = [lease for instance in of_model.answering for lease in instance.leases]
        wanted -= sum(lease.is_ending or isinstance(lease.cut_by, SlotYielded) for lease in leases)
        wait_s, costs = math.inf, list[tuple[float, Lease]]()
        for lease in leases if wanted > 0 else ():
            if lease.may_yield:
                cost_s = self._handover_s(lease)
                if in_s := yields_in_s(lease.ran_s, lease.spent_s, cost_s):
                    wait_s = min(wait_s, in_s)
                else:
                    costs.append((cost_s, lease))
            elif lease.place and not (lease.is_ending or lease.cut_by):
                wait_s = min(wait_s, _STOPS_IN_S)  # its response has not begun
        for cost_s, lease in sorted(costs, key=itemgetter(0)):
            if wanted > 0 and lease.yield_slot(cost_s):
                wanted -= 1
        return min(wait_s, _STOPS_IN_S if costs else math.inf) if wanted > 0 else math.inf

    def _handover_s(self, lease: Lease) -> float:
        index = self._prefix_index
        slot_map, measures = index.slot_maps.get(lease.upstream.name), index.measures[self.model]
        return self._fixed_s + resume_s(lease, slot_map, measures)

    def _note_handover(self, lease: Lease, yielded: SlotYielded) -> None:
        """Count a handover, and correct the estimate of the next ones by its error."""
        if (taken_s := lease.handover_s) is not None:
            self.handovers += 1
            self.handovers_s += taken_s
            corrected_s = self._fixed_s + taken_s - yielded.cost_s
            self._fixed_s = max(0.0, average(self._fixed_s, corrected_s))


def with_times(timings: Timings, lease: Lease, now_s: float) -> Timings:
    """Add times by our own clock if an instance reports only tokens.

    If tokens arrived together, their arrival times are useless, and the timings stay as they are.

    Source: llama-server, builds 10434 and 11434: `/v1/messages` has no `timings`.
    """
    first_s = lease.progress.first_token_at_s
    is_timed = timings.prompt_ms > 0 or timings.decode_ms > 0
    if is_timed or first_s is None or 2 * lease.progress.decoded < timings.decoded_tokens:
        return timings
    prompt_ms, decode_ms = 1000 * (first_s - lease.began_at_s), 1000 * (now_s - first_s)
    return replace(timings, prompt_ms=prompt_ms, decode_ms=decode_ms)


class ModelQueues(dict[str, ModelQueue]):
    """The queue of each model, made when it is needed."""

    def __init__(
        self,
        instances: Instances,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        clock: Clock,
        on_idle: Callable[[], None],
    ) -> None:
        self._parts = instances, prefix_index, settings, clock, on_idle

    def __missing__(self, model: str) -> ModelQueue:
        queue = self[model] = ModelQueue(model, *self._parts)
        return queue

    def assign_slots(self, model: str) -> None:
        self[model].assign_slots()

    def positions(self) -> Mapping[tuple[str, str], int]:
        return ChainMap(*(queue.positions() for queue in self.values()))

    def stats(self) -> Mapping[str, QueueStats]:
        return {model: queue.stats() for model, queue in self.items()}
