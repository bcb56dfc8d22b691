"""Records requests' use of engines, when their slots become free; reads records for the proxy.

The processor time between two readings is shared among the requests that held slots between them,
by their slots and by how long they held them. Internal work that holds a slot is a request, too.

Time and tokens that no request used have separate accounts: `(warming)` until an engine serves,
then `(checks)`. The tokens are read from the engine's counters while no request holds a slot, so
that the accounts add up to the engine's counters.

The router calls `UsageRecorder`, so nothing there may wait, and it uses no event that may be
dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from datetime import datetime
from itertools import count
from typing import Any, Final, cast, get_args

from prometheus_client import Metric

from proxy.errors import BadRequest, StorageFailed, Unavailable, quote
from proxy.observe.metrics import counter
from proxy.observe.past import HistoryQuery, InternalWork, RatesQuery, StoredRequest
from proxy.router.lease import Lease, SlotUse, Tokens
from proxy.upstream.upstream import Upstream
from supervisor.backend.models import without_directories
from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.states import State
from supervisor.errors import HistoryUnavailable
from supervisor.events import Event, Part
from supervisor.fleet.fleet import Fleet
from supervisor.records.usage import (
    BY_DEFAULT,
    INTERNAL_WORK,
    NO_KEY,
    OTHERS,
    By,
    Query,
    Usage,
    first_day,
)
from supervisor.records.writer import Records
from supervisor.system.processor_load import process_s

_TURN = count(1)


@dataclass(slots=True)
class EngineUse:
    pid: int | None
    model: str
    attributed: Tokens = field(default_factory=Tokens)  # tokens that were added to an account
    # by key, slot seconds of requests whose tokens are not all attributed
    untold: dict[str, float] = field(default_factory=dict)
    # by key, slot seconds of requests that were cut off
    cut_off: dict[str, float] = field(default_factory=dict)
    turn: int = 0  # changes whenever a request begins
    is_due: bool = True  # whether it may have counted tokens that are not attributed
    own_s: float = 0.0  # processor time of no request
    own_work: InternalWork = "(warming)"  # its work without requests
    # of each request that holds slots: their number, since when, and its processor time
    holders: dict[Hashable, tuple[int, float, float]] = field(default_factory=dict)
    _read_s: float = 0.0

    def begin(self, lease: Hashable, slots: int, now_s: float) -> None:
        """Note that a request got slots; before the first one, call `read_cpu`."""
        self.turn = next(_TURN)
        self.holders[lease] = (slots, now_s, 0.0)

    def read_cpu(self, cpu_s: float, now_s: float) -> None:
        """Share the processor time since the last reading; `cpu_s` is the process's total."""
        taken_s, self._read_s = max(0.0, cpu_s - self._read_s), max(cpu_s, self._read_s)
        whole = sum(slots * (now_s - since_s) for slots, since_s, _ in self.holders.values())
        if not whole:
            self.own_s += taken_s
            return
        for lease, (slots, since_s, used_s) in self.holders.items():
            share_s = taken_s * slots * (now_s - since_s) / whole
            self.holders[lease] = (slots, now_s, used_s + share_s)

    def end(self, lease: Hashable, key: str, use: SlotUse) -> float:
        """Attribute tokens to a request of a key; return its processor time."""
        self.attributed += use.tokens
        self.is_due = True
        if not use.is_exact:
            self.untold[key] = self.untold.get(key, 0.0) + use.slot_s
        if use.is_cut_off:
            self.cut_off[key] = self.cut_off.get(key, 0.0) + use.slot_s
        return self.holders.pop(lease, (0, 0.0, 0.0))[2]

    def take_rest(self, counted: Tokens) -> tuple[list[tuple[str, Tokens]], float]:
        """Attribute the rest of the engine's counters; return the parts, and the own time in s.

        Unattributed tokens are split among the requests without token counts, by slot time; without
        such requests they count as `own_work`. Tokens that the engine did not count are taken from
        the requests that were cut off.
        """
        missing = _excess_tokens(counted, self.attributed)
        surplus = _excess_tokens(self.attributed, counted)
        parts = [*share_tokens(missing, self.untold or {self.own_work: 1.0}).items()]
        self.attributed += missing
        if surplus.total and self.cut_off:
            found = share_tokens(surplus, self.cut_off).items()
            parts += [(key, Tokens() - tokens) for key, tokens in found]
            self.attributed -= surplus
        self.untold, self.cut_off, self.is_due = {}, {}, False
        own_s, self.own_s = self.own_s, 0.0
        return parts, own_s


def _excess_tokens(tokens: Tokens, other: Tokens) -> Tokens:
    return Tokens(*(max(0, figure) for figure in astuple(tokens - other)))


def share_tokens(tokens: Tokens, weights: Mapping[str, float]) -> Mapping[str, Tokens]:
    """Share tokens by weights without losing any; equally if all weights are 0."""
    parts: dict[str, Tokens] = {}
    left, weight_left = tokens, sum(weights.values())
    for done, (key, weight) in enumerate(weights.items()):
        share = weight / weight_left if weight_left else 1 / (len(weights) - done)
        part = Tokens(*(round(figure * min(1.0, share)) for figure in astuple(left)))
        parts[key], left = part, left - part
        weight_left -= weight
    return parts


# For an engine's counters.
_TIMEOUT_S = 1.0


class UsageEngines:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def ready(self) -> Iterator[tuple[str, str]]:
        for replica in self._fleet.all_replicas():
            facts = replica.instance.snapshot()
            if facts.state is State.READY and facts.pid:
                yield facts.name, facts.model

    def pid(self, instance: str, /) -> int | None:
        replica = self._fleet.find(instance)
        return replica.instance.snapshot().pid if replica else None

    async def count_tokens(self, instance: str, /) -> Tokens | None:
        if (replica := self._fleet.find(instance)) is None:
            return None
        facts = replica.instance.snapshot()
        try:
            async with (
                EngineClient(facts.endpoint, facts.api_key) as client,
                asyncio.timeout(_TIMEOUT_S),
            ):
                found = await client.read_metrics()
        except (TimeoutError, EngineUnreachable):
            return None
        if isinstance(found, ErrorResponse):
            return None
        names = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
        return Tokens(*(int(found.get(name, 0)) for name in names))


# Reading an engine's counters more often would disturb it.
_PAUSE_S: Final = 3.0
# Maximum number of keys and models in `/metrics`.
_COUNTED_MAX: Final = 256


class UsageRecorder(Part):
    """Accounts for the work of engines while `is_on()`.

    Args:
        records: Gets the usage.
        is_on: Whether usage is recorded.
        has_keys: Whether clients have names.

    Attributes:
        since_start: Usage since the daemon's start, by key and model. It never falls, so it still
            includes corrected use.
    """

    task = "usage"

    def __init__(
        self, records: Records, engines: UsageEngines, *, is_on: Callable[[], bool], has_keys: bool
    ) -> None:
        self._records = records
        self._is_on = is_on
        self._has_keys = has_keys
        self._engines = engines
        self._by_instance: dict[str, EngineUse] = {}
        self._became_ready = asyncio.Event()
        self._answered: dict[Hashable, Tokens] = {}  # by lease, the use that is added already
        self._counted: set[str] = set()  # the requests in flight that are counted
        self.since_start: dict[tuple[str, str], Usage] = {}

    # Called by the router, and for each event.

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int) -> None:
        if not self._is_on():
            return
        found = self._engine(upstream.name, upstream.model)
        if not found.holders:
            self._read_cpu(found)
        found.begin(lease, slots, time.monotonic())

    def answered(self, lease: Lease) -> None:
        """Add a request and its tokens before its client has the last of the response."""
        if not self._is_on():
            return
        tokens = Tokens()
        if lease.is_taken:
            tokens = lease.reported_tokens - self._answered.get(lease, tokens)
            self._answered[lease] = lease.reported_tokens
        request = lease.request
        requests = 0 if request.request_id in self._counted else 1
        self._counted.add(request.request_id)
        used = _usage(tokens)._replace(requests=requests)
        self._add(self._key(request.client), request.model, used)

    def slots_freed(self, lease: Hashable, use: SlotUse) -> None:
        added = self._answered.pop(lease, None)
        if not self._is_on():
            return
        found = self._engine(use.instance, use.model)
        self._read_cpu(found)
        key = self._key(use.client)
        cpu_s = found.end(lease, key, use)
        tokens = use.tokens - added if added else use.tokens
        self._add(key, use.model, _usage(tokens, use.slot_s, cpu_s))

    def observe(self, event: Event) -> None:
        """Count a request that an instance got; note the supervisor's own requests."""
        if event.name == "instance.state_changed" and event.fields["after"] == "ready":
            self._became_ready.set()
        elif event.name == "prompt.prefilled":
            if used := self._by_instance.get(str(event.fields["instance"])):
                used.is_due = True
        elif event.name == "request.finished":
            request = str(event.fields["request"])
            if request in self._counted:
                self._counted.remove(request)
            elif self._is_on():
                key = self._key(str(event.fields["client"] or ""))
                self._add(key, str(event.fields["model"]), Usage(requests=1))

    def metrics(self) -> Iterator[Metric]:
        """Yield counters since the daemon's start, by key and model."""
        found = dict(sorted(self.since_start.items()))
        yield counter("client_requests", {key: its.requests for key, its in found.items()})
        tokens = {
            (*key, kind): getattr(its, f"{kind}_tokens")
            for key, its in found.items()
            for kind in ("prompt", "cached", "generated")
        }
        yield counter("client_tokens", tokens)
        yield counter("client_slot_seconds", {key: its.slot_s for key, its in found.items()})
        yield counter("client_cpu_seconds", {key: its.cpu_s for key, its in found.items()})

    # The daemon's task.

    async def serve(self) -> None:
        """Account for unattributed usage, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._became_ready.wait()
            self._became_ready.clear()
            await self.settle()

    async def settle(self) -> None:
        """Account for tokens that idle engines counted and no request used."""
        for instance, model in list(self._engines.ready()):
            engine = self._engine(instance, model)
            if self._is_on() and engine.is_due and not engine.holders:
                await self._settle(instance, engine)

    async def _settle(self, instance: str, engine: EngineUse) -> None:
        turn = engine.turn
        counted = await self._engines.count_tokens(instance)
        is_same = self._by_instance.get(instance) is engine and engine.turn == turn
        if counted is None or not is_same:
            return
        self._read_cpu(engine)
        own_work = engine.own_work
        parts, own_s = engine.take_rest(counted)
        for key, tokens in parts:
            if tokens != Tokens():
                self._add(key, engine.model, _usage(tokens))
        if own_s:
            self._add(own_work, engine.model, Usage(cpu_s=own_s))
        engine.own_work = "(checks)"

    def _engine(self, instance: str, model: str) -> EngineUse:
        pid, found = self._engines.pid(instance), self._by_instance.get(instance)
        if found is None or found.pid != pid:
            found = self._by_instance[instance] = EngineUse(pid, model)
        return found

    def _read_cpu(self, engine: EngineUse) -> None:
        cpu_s = process_s(engine.pid) if engine.pid else None
        if cpu_s is not None:
            engine.read_cpu(cpu_s, time.monotonic())

    def _key(self, client: str) -> str:
        is_known = client in INTERNAL_WORK or (self._has_keys and client)
        return client if is_known else NO_KEY

    def _add(self, key: str, model: str, usage: Usage) -> None:
        self._records.add_usage(key, model, usage)
        names = (key, model)
        if names not in self.since_start and len(self.since_start) >= _COUNTED_MAX:
            names = (OTHERS, OTHERS)
        if min(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) >= 0:
            self.since_start[names] = self.since_start.get(names, Usage()) + usage


def _usage(tokens: Tokens, slot_s: float = 0.0, cpu_s: float = 0.0) -> Usage:
    return Usage(0, tokens.prompt, tokens.cached, tokens.decoded, slot_s, cpu_s)


class RecordsAdapter:
    def __init__(self, records: Records) -> None:
        self._records = records

    async def requests(self, query: HistoryQuery) -> Sequence[StoredRequest]:
        """Implements `RequestHistory.requests`; empty while the history is off."""
        if not self._records.keeps_history:
            return ()
        try:
            return await self._records.requests(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error

    async def rates(self, query: RatesQuery) -> Mapping[str, Sequence[float | None]]:
        """Implements `RequestHistory.rates`."""
        try:
            return await self._records.rates(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error

    async def cache_rates(self, query: RatesQuery) -> Mapping[str, Mapping[str, Sequence[float]]]:
        """Implements `RequestHistory.cache_rates`."""
        try:
            return await self._records.cache_rates(query)
        except HistoryUnavailable as error:
            raise StorageFailed(without_directories(error.message)) from error

    async def usage(
        self,
        *,
        by: str | None = None,
        since: str | None = None,
        key: str | None = None,
        model: str | None = None,
    ) -> Sequence[Mapping[str, Any]]:
        names = by.split(",") if by else BY_DEFAULT
        if not set(names) <= set(get_args(By)) or len(set(names)) < len(names):
            choices = ", ".join(get_args(By))
            raise BadRequest(f"by={quote(by or '')} is unknown; expected some of {choices}")
        try:
            first = first_day(since, datetime.now().astimezone().date())
        except ValueError as error:
            raise BadRequest(f"since: {error}; write 2026-11-22, 2026-11 or 7d") from error
        try:
            return await self._records.usage(Query(cast("Sequence[By]", names), first, key, model))
        except HistoryUnavailable as error:
            raise Unavailable(without_directories(error.message)) from error
