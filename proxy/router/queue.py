"""The requests that wait for one model: their order and their limit. Pure.

1. `interactive` goes before `batch`. To prevent starvation, one batch request is served after eight
   interactive ones, and after every interactive one once the first batch request has waited half of
   its timeout; never two in a row while interactive requests wait.
2. Within a priority, clients share: each entry gets a tag, one more than the client's previous tag,
   and at least the priority's own time; the lowest tag is first. A client with a hundred requests
   and one with a single request alternate. The priority's time advances by one while each waiting
   client is served once, so newcomers do not delay clients that waited before them.
3. Within a priority, one client's requests keep their order.

Source: start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from proxy.cache.prompt import session_hash
from proxy.request.request import Priority, ProxyRequest
from proxy.router.lease import Lease, RoutingTarget
from proxy.settings import ProxySettings
from proxy.upstream.timings import Timings, average

# Assumed time for which a request holds a slot, before the first has finished.
_HELD_S: Final = 2.0
_RETRY_MAX_S: Final = 120


class LeaseTimes:
    """Averages over finished requests.

    Attributes:
        held_s: Time from the lease of a slot to the end of the response.
        decode_s: The part of it from the first to the last token.
    """

    def __init__(self) -> None:
        self.held_s = _HELD_S
        self.decode_s = 0.0

    def note(self, held_s: float, timings: Timings | None) -> None:
        self.held_s = average(self.held_s, held_s)
        if timings:
            self.decode_s = average(self.decode_s, timings.decode_ms / 1000)

    def wait_s(self, waiting: int, slots: int) -> float:
        """Return the expected wait behind `waiting` requests for one of `slots` slots."""
        return self.held_s * (waiting + 1) / max(1, slots)


def retry_after_s(wait_s: float) -> int:
    """Whole seconds after which a retry is worthwhile, 1 to 120."""
    return min(max(1, math.ceil(wait_s)), _RETRY_MAX_S)


_TURNS_BEFORE_BATCH: Final = 8
_OVERDUE: Final = 0.5
# Clients remembered beyond those in the queue, until their tags are dropped as useless.
_CLIENTS_MAX: Final = 256


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """One request in the queue.

    Attributes:
        joined_at_s: Monotonic.
        tag: Its place in the priority's own time; set by the queue.
        number: Its place among equal tags; set by the queue.
    """

    client: str
    priority: Priority
    joined_at_s: float
    timeout_s: float
    tag: float = -1.0
    number: int = 0

    def is_overdue(self, now_s: float) -> bool:
        return now_s - self.joined_at_s >= _OVERDUE * self.timeout_s


P = TypeVar("P", bound=QueueEntry)


class FairQueue(Generic[P]):
    """Two priorities; unbounded: the caller decides which requests join."""

    def __init__(self) -> None:
        self._priorities: dict[Priority, _PriorityQueue[P]] = {
            "interactive": _PriorityQueue(),
            "batch": _PriorityQueue(),
        }
        self._turns = 0

    def __len__(self) -> int:
        return len(self._priorities["interactive"].entries) + len(self._priorities["batch"].entries)

    def waiting(self, priority: Priority) -> int:
        return len(self._priorities[priority].entries)

    def join(self, entry: P) -> None:
        """Add an entry; an entry that was removed before returns to its place."""
        self._priorities[entry.priority].join(entry)

    def leave(self, entry: P) -> None:
        self._priorities[entry.priority].leave(entry)

    def take(self, entry: P) -> None:
        """Serve an entry; it need not be the first."""
        self._priorities[entry.priority].take(entry)
        is_put_off = entry.priority == "interactive" and self.waiting("batch")
        self._turns = self._turns + 1 if is_put_off else 0

    def order(self, now_s: float) -> Iterator[P]:
        return self._serve_order(
            self._priorities["interactive"].entries, self._priorities["batch"].entries, now_s
        )

    def order_with(self, entry: P, now_s: float) -> list[P]:
        """Return the order as if an entry had joined; sets only its tag and number."""
        entry.tag, entry.number = self._priorities[entry.priority].next_turn(entry.client)
        entries: dict[Priority, list[P]] = {
            priority: list(queue.entries) for priority, queue in self._priorities.items()
        }
        insort(entries[entry.priority], entry, key=_turn)
        return list(self._serve_order(entries["interactive"], entries["batch"], now_s))

    def _serve_order(
        self, interactive: Iterable[P], batch: Iterable[P], now_s: float
    ) -> Iterator[P]:
        first, second, turns = deque(interactive), deque(batch), self._turns

        def is_batch_due() -> bool:
            return turns >= (1 if second[0].is_overdue(now_s) else _TURNS_BEFORE_BATCH)

        while first or second:
            if second and (not first or is_batch_due()):
                turns = 0
                yield second.popleft()
            else:
                turns += 1
                yield first.popleft()

    def position(self, entry: P, now_s: float) -> int:
        """Return the place of an entry, from 1; 0 if it is not in the queue."""
        before = (number for number, other in enumerate(self.order(now_s), 1) if other is entry)
        return next(before, 0)

    def oldest_wait_s(self, now_s: float) -> float:
        """Return the longest wait so far; 0 in an empty queue."""
        waits = (
            now_s - entry.joined_at_s
            for priority in self._priorities.values()
            for entry in priority.entries
        )
        return max(waits, default=0.0)


class _PriorityQueue(Generic[P]):
    """One priority, in the order of its tags."""

    def __init__(self) -> None:
        self.entries: list[P] = []
        self._time = 0.0
        self._next: dict[str, float] = {}  # tag of a client's next entry
        self._count = 0

    def join(self, entry: P) -> None:
        if entry.tag < 0:
            entry.tag, entry.number = self.next_turn(entry.client)
            self._count += 1
            self._next[entry.client] = entry.tag + 1
        insort(self.entries, entry, key=_turn)

    def next_turn(self, client: str) -> tuple[float, int]:
        return max(self._time, self._next.get(client, 0.0)), self._count + 1

    def leave(self, entry: P) -> None:
        if entry not in self.entries:
            return
        self.entries.remove(entry)
        if self._next.get(entry.client) == entry.tag + 1:
            self._next[entry.client] = entry.tag

    def take(self, entry: P) -> None:
        clients = {entry.client for entry in self.entries}
        self.entries.remove(entry)
        self._time = max(self._time + 1 / len(clients), entry.tag)
        if len(self._next) > len(clients) + _CLIENTS_MAX:
            self._next = {client: tag for client, tag in self._next.items() if tag > self._time}


def _turn(entry: QueueEntry) -> tuple[float, int]:
    return entry.tag, entry.number


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest(QueueEntry):
    """A request in the queue.

    Attributes:
        avoid: Names of instances to take only if there is no other.
        session: The hash of the client's own name for the conversation, or None.
        new_tokens: Prompt tokens to compute, as expected when it joined.
        position: Place when it joined, from 1; 0 if it got a slot at once.
        awaited: The owner for which it waits although another instance has a free slot, or None.
        looks_again_at_s: Time at which it chooses again in any case.
    """

    request: ProxyRequest
    avoid: Collection[str] = ()
    session: int | None = None
    lease: Lease | None = None
    new_tokens: int = 0
    position: int = 0
    awaited: RoutingTarget | None = None
    looks_again_at_s: float = 0.0
    _wake: asyncio.Event | None = field(default=None, init=False)

    @property
    def wake(self) -> asyncio.Event:
        """Set when it gets a lease, and when no instance can give it one any more."""
        if self._wake is None:  # most requests never wait
            self._wake = asyncio.Event()
        return self._wake


def queue_entry(request: ProxyRequest, avoid: Collection[str], now_s: float) -> QueuedRequest:
    return QueuedRequest(
        client=request.client,
        priority=request.priority,
        joined_at_s=now_s,
        timeout_s=request.queue_timeout_s,
        request=request,
        avoid=avoid,
        session=session_hash(request.model, request.client, request.session)
        if request.session
        else None,
    )


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Numbers of waiting requests; `expected_wait_s` is for a request that joins now."""

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class RequestQueue(FairQueue[QueuedRequest]):
    def __init__(self, model: str, settings: ProxySettings) -> None:
        super().__init__()
        self.model = model
        self.settings = settings

    def is_full(self, priority: Priority) -> bool:
        limits = self.settings
        most = limits.queue_max if priority == "interactive" else limits.batch.config.queue_size
        return self.waiting(priority) > most

    def stats(self, now_s: float, expected_wait_s: float) -> QueueStats:
        return QueueStats(
            self.waiting("interactive"),
            self.waiting("batch"),
            self.oldest_wait_s(now_s),
            expected_wait_s,
        )
