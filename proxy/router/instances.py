"""The instances, and what each of them holds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from aiorwlock import RWLock

from proxy.adapter import MARK
from proxy.estimate.finished import FinishedRequests
from proxy.router.in_flight import InFlight
from proxy.router.prefill_admission import InstanceWork
from proxy.router.weights import EQUAL, Speed, Weight
from proxy.upstream.rates import Rates
from proxy.upstream.upstream import Upstream

if TYPE_CHECKING:
    from proxy.request import ProxyRequest
    from proxy.router.lease import Lease, LeaseStats


class ProcessExit(Enum):
    """How the process of an instance ended."""

    CRASHED = "crashed"  # by a signal that was not ours, and a request may be to blame
    KILLED = "killed"  # by SIGKILL from outside: no request is to blame
    STOPPED = "stopped"  # on purpose, as to unload its model
    FAILED = "failed"  # in another way


@dataclass(frozen=True, slots=True)
class Activity:
    """An instance's requests.

    Attributes:
        awaiting_upstream: Those whose next bytes are the instance's to send; for the others, a
            client has yet to take what was sent.
        bytes_received: Of responses, without pings; never less while it is in service or holds one.
        is_silent: It does not answer `/health`.
    """

    in_flight: int = 0
    awaiting_upstream: int = 0
    bytes_received: int = 0
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class InstanceStats:
    """An instance at one moment.

    Attributes:
        conversations: Latest conversations that it owns.
        prefill_tps: 0 before its first answer, as `decode_tps`.
        acceptance: Share of drafted tokens that are accepted, 0 to 1; None before any.
    """

    upstream: Upstream
    in_service: bool
    conversations: int
    prefill_tps: float
    decode_tps: float
    leases: tuple[LeaseStats, ...]
    acceptance: float | None = None
    weight: Weight = EQUAL


@dataclass(slots=True, eq=False)
class Instance:
    """An instance, its requests, and its slots in use.

    A slot may be in use longer than its request lasts (the engine has yet to stop), or shorter (the
    client has yet to take the end of the response).

    Attributes:
        is_silent: It does not respond and gets no request that another can take.
        turn: Its place in the order of use; what has a larger weight comes more often.
        bit: Its place in sets of instances: a number of one bit, as of `PrefixIndex`.
        changed: Gets it where its leases, its turn or its rates have changed.
        bytes_received: Of responses to requests that are over.
        finished: Its latest requests, as estimates learn from them.
        chunk_turn: Held for a chunk of a prompt, and for the pause after it.
        slot_order: Held to read by requests that name a slot of known number while it is made
            ready, and to write by those that depend on the order in which the engine takes slots.
        owner_turn: Held while the requests of one owner of caches make room for another's.
    """

    upstream: Upstream
    rates: Rates
    in_service: bool = True
    is_silent: bool = False
    turn: float = 0.0
    bit: int = 0
    changed: set[Instance] = field(default_factory=set)
    bytes_received: int = 0
    in_flight: InFlight[Lease] = field(default_factory=InFlight)
    leases: list[Lease] = field(default_factory=list)
    finished: FinishedRequests = field(default_factory=FinishedRequests)
    chunk_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    slot_order: RWLock = field(default_factory=lambda: RWLock(fast=True))
    owner_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _placed: asyncio.Event | None = field(default=None, init=False)

    @property
    def activity(self) -> Activity:
        responses = [lease.progress for lease in self.in_flight]
        return Activity(
            len(responses),
            sum(one.is_awaiting_upstream for one in responses),
            self.bytes_received + sum(one.bytes_received for one in responses),
            self.is_silent,
        )

    def note_placed(self) -> None:
        """Note that a request has its slot in the engine, or has left it."""
        if self._placed:
            self._placed.set()
            self._placed = None

    async def wait_placed(self) -> None:
        """Wait until a request has its slot, or has left. Its own limits end the wait."""
        self._placed = self._placed or asyncio.Event()
        await self._placed.wait()

    @property
    def has_free_slot(self) -> bool:
        return len(self.leases) < self.upstream.slots

    def hold(self, leases: Sequence[Lease]) -> None:
        """Note that slots are in use."""
        self.leases += leases
        self.changed.add(self)

    def drop(self, lease: Lease) -> None:
        """Note that a slot is free."""
        self.leases.remove(lease)
        self.changed.add(self)

    def set_turn(self, turn: float) -> None:
        self.turn = turn
        self.changed.add(self)

    def set_rates(self, rates: Rates) -> None:
        self.rates = rates
        self.changed.add(self)

    def can_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here, and as many slots are free as it uses."""
        return self.may_take(request) and self.free >= self.needed(request)

    @property
    def free(self) -> int:
        """Free slots."""
        return self.upstream.slots - len(self.leases)

    @property
    def is_spare(self) -> bool:
        """Whether it takes only requests that find no free slot elsewhere."""
        return self.upstream.node is not None and self.upstream.node.is_spare

    def needed(self, request: ProxyRequest) -> int:
        """Return how many slots a request uses here."""
        return min(request.slots, self.upstream.slots)

    def may_take(self, request: ProxyRequest) -> bool:
        """Return whether a request may come here.

        One that was forwarded stays on this machine, and one for a variant that this machine does
        not have goes to a node that has it.
        """
        node = self.upstream.node
        if request.remote_variant and (node is None or request.remote_variant not in node.variants):
            return False
        if node and request.adapter and MARK + request.adapter not in node.variants:
            return False
        return not (request.is_from_proxy and node)

    @property
    def ending(self) -> list[Lease]:
        """Slots in use whose requests are over, the oldest first."""
        return [lease for lease in self.leases if lease.is_ending]

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that it still has to compute."""
        return sum(lease.backlog_tokens for lease in self.leases)

    @property
    def work(self) -> InstanceWork:
        return InstanceWork(
            prefilling=sum(lease.is_prefilling for lease in self.leases),
            decoding=sum(lease.is_decoding for lease in self.leases),
        )

    def speed(self, *, is_measured: bool) -> Speed:
        node = self.upstream.node
        weight = node.weight if node else None
        return Speed(self.rates.latency, weight) if is_measured else Speed(weight=weight)

    def stats(self, conversations: int, weight: Weight) -> InstanceStats:
        known = bool(self.rates.answers)
        return InstanceStats(
            self.upstream,
            self.in_service,
            conversations,
            self.rates.prefill_tps if known else 0.0,
            self.rates.decode_tps if known else 0.0,
            tuple(lease.stats() for lease in self.leases),
            self.rates.acceptance,
            weight,
        )
