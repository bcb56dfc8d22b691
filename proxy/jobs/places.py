"""How many lines each model computes at once; a line waits until its model has a place.

As many as the model has slots, so that few wait in its queue, where they have batch priority: the
router serves other requests first. Each owner of batches has a queue for each model, and the one
with the fewest places comes first. Each batch waits with one line at a time, so batches take turns.
The lines that are computed together take a bounded amount of memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from proxy.jobs.settings import JobSettings

_MEMORY_MAX_BYTES: Final = 64 * 1024**2


def places_of(slots: int, settings: JobSettings) -> int:
    """How many lines a model with so many slots computes at once; 0 slots: not known yet."""
    return max(1, min(slots, settings.max_in_flight))


@dataclass(slots=True, eq=False)
class Place:
    """The right to compute one line, from `Places.take` until `Places.release`."""

    model: str
    owner: str
    size_bytes: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """The places of all models; `limit_of` says how many a model has now."""

    def __init__(self, limit_of: Callable[[str], int]) -> None:
        self._limit_of = limit_of
        self._taken: Counter[str] = Counter()
        self._taken_by: Counter[tuple[str, str]] = Counter()
        self._held_bytes = 0
        self._waiting: deque[Place] = deque()

    async def take(self, place: Place) -> None:
        """Wait for a place; it may have been released before."""
        self._waiting.append(place)
        self._grant()
        try:
            await place.granted.wait()
        except asyncio.CancelledError:
            if not place.granted.is_set():
                self._waiting.remove(place)
            self.release(place)
            raise

    def release(self, place: Place) -> None:
        """Give a place back; nothing where it is not taken."""
        if place.granted.is_set():
            place.granted.clear()
            self._count(place, -1)
            self._grant()

    def _count(self, place: Place, change: int) -> None:
        self._taken[place.model] += change
        self._taken_by[place.model, place.owner] += change
        if not self._taken_by[place.model, place.owner]:
            del self._taken_by[place.model, place.owner]
        self._held_bytes += change * place.size_bytes

    def _grant(self) -> None:
        while place := min(filter(self._has_room, self._waiting), key=self._turn, default=None):
            self._waiting.remove(place)
            self._count(place, 1)
            place.granted.set()

    def _turn(self, place: Place) -> int:
        """Return the places of an owner; of equals, `min` takes the one that came first."""
        return self._taken_by[place.model, place.owner]

    def _has_room(self, place: Place) -> bool:
        is_small = self._held_bytes + place.size_bytes <= _MEMORY_MAX_BYTES
        is_alone = not self._held_bytes
        return (is_small or is_alone) and self._taken[place.model] < self._limit_of(place.model)
