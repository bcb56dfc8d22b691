"""The waiting line of one model: who is served next. Pure.

1. Two priorities: whoever is in `interactive` goes before whoever is in `batch`. So that a batch is
   not put off for ever, it gets one turn after eight interactive ones, and one after each of them
   once its first request has waited half as long as it is willing to. Never two while others wait.
2. Within a priority, clients share: each place gets a tag, one more than the client's last one, and
   at least the priority's own time; the lowest tag is first. A client with a hundred requests in
   line and one with a single request take turns. The priority's time moves by one while each client
   that waits is served once, so newcomers, however many, do not put off those who were there
   before.
3. Within a priority, one client's requests keep their order.

A place is left at once and without a trace. Nothing here waits: the time is an argument.

Source: start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from proxy.request import Priority

_TURNS_BEFORE_BATCH: Final = 8
_OVERDUE: Final = 0.5
# Clients remembered beyond those in line; their tags are of no more use, and are swept away.
_REMEMBERED_MAX: Final = 256


@dataclass(slots=True, eq=False, kw_only=True)
class QueueEntry:
    """One place in a line.

    Attributes:
        client: Who waits, for fairness.
        priority: Which priority.
        joined_at_s: Monotonic time at which the wait began.
        queue_timeout_s: Seconds it may last, at least 0.
        tag: Its turn in the priority's own time; set by the line.
        number: Its turn among equal tags; set by the line.
    """

    client: str
    priority: Priority
    joined_at_s: float
    timeout_s: float
    tag: float = -1.0
    number: int = 0

    def is_overdue(self, now_s: float) -> bool:
        """Return whether it has waited half as long as it is willing to."""
        return now_s - self.joined_at_s >= _OVERDUE * self.timeout_s


P = TypeVar("P", bound=QueueEntry)


class FairQueue(Generic[P]):
    """The places of one line, in two priorities. Who bounds it is whoever lets them join."""

    def __init__(self) -> None:
        self._lanes: dict[Priority, _PriorityQueue[P]] = {
            "interactive": _PriorityQueue(),
            "batch": _PriorityQueue(),
        }
        self._turns = 0

    def __len__(self) -> int:
        return len(self._lanes["interactive"].places) + len(self._lanes["batch"].places)

    def waiting(self, priority: Priority) -> int:
        """Return how many wait in a priority."""
        return len(self._lanes[priority].places)

    def join(self, place: P) -> None:
        """Take a place; one that was taken out before goes back to where it was."""
        self._lanes[place.priority].join(place)

    def leave(self, place: P) -> None:
        """Give up a place; nothing where it is not in line."""
        self._lanes[place.priority].leave(place)

    def take(self, place: P) -> None:
        """Serve the request in a place, which need not be the first."""
        self._lanes[place.priority].take(place)
        is_put_off = place.priority == "interactive" and self.waiting("batch")
        self._turns = self._turns + 1 if is_put_off else 0

    def order(self, now_s: float) -> Iterator[P]:
        """Return all places as they would be served now, the first first."""
        first = deque(self._lanes["interactive"].places)
        second = deque(self._lanes["batch"].places)
        turns = self._turns
        while first or second:
            if second and (not first or _is_due(second[0], turns, now_s)):
                turns = 0
                yield second.popleft()
            else:
                turns += 1
                yield first.popleft()

    def position(self, place: P, now_s: float) -> int:
        """Return how many are served up to and with this place: 1 for the first."""
        before = (number for number, one in enumerate(self.order(now_s), 1) if one is place)
        return next(before, 0)

    def oldest_wait_s(self, now_s: float) -> float:
        """Return how long the one that has waited longest has waited; 0 where nobody does."""
        waits = (
            now_s - one.joined_at_s for priority in self._lanes.values() for one in priority.places
        )
        return max(waits, default=0.0)


def _is_due(batch: QueueEntry, turns: int, now_s: float) -> bool:
    return turns >= (1 if batch.is_overdue(now_s) else _TURNS_BEFORE_BATCH)


class _PriorityQueue(Generic[P]):
    """One priority, in the order of its tags.

    Attributes:
        places: Those who wait, the first first.
    """

    def __init__(self) -> None:
        self.places: list[P] = []
        self._time = 0.0
        self._next: dict[str, float] = {}  # the tag that a client's next place would get
        self._count = 0

    def join(self, place: P) -> None:
        if place.tag < 0:
            self._count += 1
            place.number = self._count
            place.tag = max(self._time, self._next.get(place.client, 0.0))
            self._next[place.client] = place.tag + 1
        insort(self.places, place, key=_turn)

    def leave(self, place: P) -> None:
        if place not in self.places:
            return
        self.places.remove(place)
        if self._next.get(place.client) == place.tag + 1:
            self._next[place.client] = place.tag

    def take(self, place: P) -> None:
        clients = {one.client for one in self.places}
        self.places.remove(place)
        self._time = max(self._time + 1 / len(clients), place.tag)
        if len(self._next) > len(clients) + _REMEMBERED_MAX:
            self._next = {who: tag for who, tag in self._next.items() if tag > self._time}


def _turn(place: QueueEntry) -> tuple[float, int]:
    return place.tag, place.number
