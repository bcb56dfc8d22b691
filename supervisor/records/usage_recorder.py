"""Records what requests use of engines, when their slots become free.

The processor time between two readings is shared among the requests that held slots between them,
by their slots and by how long they held them. Time without a request is the engine's own: loading,
warming.

Tokens that an engine counted and no request used have an account of their own: warming, health
checks, calibration. They are read from the engine's counters while no request holds a slot, so that
the accounts add up to the engine's counters.

The router calls this module, so nothing here may wait, and it uses no event that may be dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from itertools import count
from typing import Final, Protocol

from proxy.router.reports import SlotUse, Tokens
from proxy.upstream.upstream import Upstream
from supervisor.errors import AccessDenied
from supervisor.events import Emit, Event
from supervisor.records.usage import NO_KEY, OTHERS, OWN_WORK, Account, Usage
from supervisor.records.usage_files import Journal


@dataclass(slots=True)
class _Holder:
    slots: int
    since_s: float
    cpu_s: float = 0.0


class CpuShares:
    """The processor time of one process, from its start; `own_s` is the time of no request."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self._holders: dict[Hashable, _Holder] = {}
        self._read_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self._holders

    def begin(self, holder: Hashable, slots: int, now_s: float) -> None:
        """Note that a request got slots; before the first one, call `read`."""
        self._holders[holder] = _Holder(slots, now_s)

    def read(self, cpu_s: float, now_s: float) -> None:
        """Share the processor time since the last reading; `cpu_s` is the process's total."""
        taken_s, self._read_s = max(0.0, cpu_s - self._read_s), max(cpu_s, self._read_s)
        holders = self._holders.values()
        whole = sum(holder.slots * (now_s - holder.since_s) for holder in holders)
        if not whole:
            self.own_s += taken_s
            return
        for holder in holders:
            holder.cpu_s += taken_s * holder.slots * (now_s - holder.since_s) / whole
            holder.since_s = now_s

    def end(self, holder: Hashable) -> float:
        """Return the processor time of a request whose slots are free; call `read` before."""
        found = self._holders.pop(holder, None)
        return found.cpu_s if found else 0.0


_TURN = count(1)


@dataclass(slots=True)
class EngineUse:
    """The usage of one engine process.

    Attributes:
        attributed: Tokens that were added to an account.
        untold: By key, slot seconds of requests whose tokens are not all attributed.
        cut_off: By key, slot seconds of requests that were cut off.
        turn: Changes whenever a request begins.
        is_due: Whether it may have counted tokens that are not attributed.
    """

    pid: int | None
    model: str
    shares: CpuShares = field(default_factory=CpuShares)
    attributed: Tokens = field(default_factory=Tokens)
    untold: dict[str, float] = field(default_factory=dict)
    cut_off: dict[str, float] = field(default_factory=dict)
    turn: int = 0
    is_due: bool = True

    @property
    def is_idle(self) -> bool:
        return self.shares.is_idle

    def begin(self, lease: Hashable, slots: int, now_s: float) -> None:
        self.turn = next(_TURN)
        self.shares.begin(lease, slots, now_s)

    def end(self, lease: Hashable, key: str, use: SlotUse) -> float:
        """Attribute tokens to a request of a key; return its processor time."""
        self.attributed += use.tokens
        self.is_due = True
        if not use.is_exact:
            self.untold[key] = self.untold.get(key, 0.0) + use.slot_s
        if use.is_cut_off:
            self.cut_off[key] = self.cut_off.get(key, 0.0) + use.slot_s
        return self.shares.end(lease)

    def take_rest(self, counted: Tokens) -> tuple[list[tuple[str, Tokens]], float]:
        """Attribute the rest of the engine's counters; return the parts, and the own time in s.

        Unattributed tokens are split among the requests without token counts, by slot time; without
        such requests they count as the supervisor's own. Tokens that the engine did not count are
        taken from the requests that were cut off.
        """
        missing, surplus = (
            _excess_tokens(counted, self.attributed),
            _excess_tokens(self.attributed, counted),
        )
        parts = [*share_tokens(missing, self.untold or {OWN_WORK: 1.0}).items()]
        self.attributed += missing
        if surplus.total and self.cut_off:
            found = share_tokens(surplus, self.cut_off).items()
            parts += [(key, Tokens() - tokens) for key, tokens in found]
            self.attributed -= surplus
        self.untold, self.cut_off, self.is_due = {}, {}, False
        own_s, self.shares.own_s = self.shares.own_s, 0.0
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


# Reading an engine's counters more often would disturb it.
_PAUSE_S: Final = 3.0
_FOLD_S: Final = 600.0
# Maximum number of keys and models in `/metrics`.
_COUNTED_MAX: Final = 256


class Engines(Protocol):
    """The present engine processes."""

    def ready(self) -> Iterable[tuple[str, str, int]]:
        """Yield instance, model and pid of each engine that serves."""

    def pid(self, instance: str, /) -> int | None: ...

    def cpu_s(self, pid: int, /) -> float | None:
        """Return the processor time since the process started, or None if unknown."""

    async def count_tokens(self, instance: str, /) -> Tokens | None:
        """Return the tokens since the engine started, or None if it does not report them."""


class UsageRecorder:
    """Records while `is_on()`; `has_keys` tells whether clients have names.

    Attributes:
        since_start: Usage since the daemon's start, by key and model. It never falls, so it still
            includes what was taken back.
    """

    def __init__(
        self,
        journal: Journal,
        engines: Engines,
        emit: Emit,
        *,
        is_on: Callable[[], bool],
        has_keys: bool,
    ) -> None:
        self._journal = journal
        self._engines = engines
        self._emit = emit
        self._is_on = is_on
        self._has_keys = has_keys
        self._by_instance: dict[str, EngineUse] = {}
        self._has_failed = False
        self._full = asyncio.Event()
        self._ready = asyncio.Event()
        self.since_start: dict[tuple[str, str], Usage] = {}

    # Called by the router, and for each event.

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int) -> None:
        if not self._is_on():
            return
        found = self._engine(upstream.name, upstream.model)
        if found.is_idle:
            self._read_cpu(found)
        found.begin(lease, slots, time.monotonic())

    def slots_freed(self, lease: Hashable, use: SlotUse) -> None:
        if not self._is_on():
            return
        found = self._engine(use.instance, use.model)
        self._read_cpu(found)
        key = self._key(use.client)
        cpu_s = found.end(lease, key, use)
        self._add(key, use.model, _usage(use.tokens, use.slot_s, cpu_s))

    def observe(self, event: Event) -> None:
        """Count a request that an instance got; note the supervisor's own requests."""
        if event.name == "instance.state_changed" and event.fields["after"] == "ready":
            self._ready.set()
        elif event.name == "prompt.prefilled":
            if used := self._by_instance.get(str(event.fields["instance"])):
                used.is_due = True
        elif event.name == "request.finished" and self._is_on():
            key = self._key(str(event.fields["client"] or ""))
            self._add(key, str(event.fields["model"]), Usage(requests=1))

    # The daemon's task.

    async def serve(self) -> None:
        """Fold the journal and account for unattributed usage, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_folded())
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_S):
                            await self._ready.wait()
                    self._ready.clear()
                    await self.settle()
        finally:
            self._journal.close()

    async def settle(self) -> None:
        """Account for what idle engines counted and no request used."""
        for instance, model, _ in list(self._engines.ready()):
            engine = self._engine(instance, model)
            if self._is_on() and engine.is_due and engine.is_idle:
                await self._settle(instance, engine)

    async def _settle(self, instance: str, engine: EngineUse) -> None:
        turn = engine.turn
        counted = await self._engines.count_tokens(instance)
        is_same = self._by_instance.get(instance) is engine and engine.turn == turn
        if counted is None or not is_same:
            return
        self._read_cpu(engine)
        parts, own_s = engine.take_rest(counted)
        for key, tokens in parts:
            if tokens != Tokens():
                self._add(key, engine.model, _usage(tokens))
        if own_s:
            self._add(OWN_WORK, engine.model, Usage(cpu_s=own_s))

    async def _keep_folded(self) -> None:
        while True:
            if self._is_on() and not (self._journal.is_open and self._journal.is_empty):
                self._report(await self._fold())
            self._full.clear()
            await asyncio.sleep(_PAUSE_S)  # a failure is not repeated at each request
            with suppress(TimeoutError):
                async with asyncio.timeout(_FOLD_S):
                    await self._full.wait()

    async def _fold(self) -> str | None:
        """Continue in a new file and count the last; return why that failed, or None."""
        try:
            number, file = await asyncio.to_thread(self._journal.open_next)
            self._journal.begin(number, file)
            damaged = await asyncio.to_thread(self._journal.fold)
        except (OSError, ValueError, AccessDenied) as error:
            return str(error)
        return f"damaged and set aside: {', '.join(damaged)}" if damaged else None

    def _engine(self, instance: str, model: str) -> EngineUse:
        pid, found = self._engines.pid(instance), self._by_instance.get(instance)
        if found is None or found.pid != pid:
            found = self._by_instance[instance] = EngineUse(pid, model)
        return found

    def _read_cpu(self, engine: EngineUse) -> None:
        cpu_s = self._engines.cpu_s(engine.pid) if engine.pid else None
        if cpu_s is not None:
            engine.shares.read(cpu_s, time.monotonic())

    def _key(self, client: str) -> str:
        if not client:
            return OWN_WORK
        return client if self._has_keys else NO_KEY

    def _add(self, key: str, model: str, usage: Usage) -> None:
        day = time.strftime("%Y-%m-%d")
        self._report(self._journal.write(Account(day, key, model), usage))
        names = (key, model)
        if names not in self.since_start and len(self.since_start) >= _COUNTED_MAX:
            names = (OTHERS, OTHERS)
        if min(usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) >= 0:
            self.since_start[names] = self.since_start.get(names, Usage()) + usage
        if self._journal.is_full:
            self._full.set()

    def _report(self, failure: str | None) -> None:
        """Warn of the first failure in a row."""
        if failure and not self._has_failed:
            self._emit("usage.record_failed", reason=failure)
        self._has_failed = failure is not None


def _usage(tokens: Tokens, slot_s: float = 0.0, cpu_s: float = 0.0) -> Usage:
    return Usage(0, tokens.prompt, tokens.cached, tokens.decoded, slot_s, cpu_s)
