"""How many lines each model computes at once; a line waits until its model has a place.

As many as the model has slots, so that few wait in its queue, where they have batch priority: the
router serves other requests first. Each batch waits with one line at a time, so batches take turns.
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
    size_bytes: int
    granted: asyncio.Event = field(default_factory=asyncio.Event)


class Places:
    """The places of all models; `limit_of` says how many a model has now."""

    def __init__(self, limit_of: Callable[[str], int]) -> None:
        self._limit_of = limit_of
        self._taken: Counter[str] = Counter()
        self._held_bytes = 0
        self._waiting: deque[Place] = deque()

    async def take(self, model: str, size_bytes: int) -> Place:
        """Wait for a place; in order of arrival for each model."""
        place = Place(model, size_bytes)
        self._waiting.append(place)
        self._grant()
        try:
            await place.granted.wait()
        except asyncio.CancelledError:
            self._withdraw(place)
            raise
        return place

    def release(self, place: Place) -> None:
        self._taken[place.model] -= 1
        self._held_bytes -= place.size_bytes
        self._grant()

    def _withdraw(self, place: Place) -> None:
        if place.granted.is_set():
            self.release(place)
        else:
            self._waiting.remove(place)

    def _grant(self) -> None:
        for place in [one for one in self._waiting if self._has_room(one)]:
            if self._has_room(place):
                self._waiting.remove(place)
                self._taken[place.model] += 1
                self._held_bytes += place.size_bytes
                place.granted.set()

    def _has_room(self, place: Place) -> bool:
        is_small = self._held_bytes + place.size_bytes <= _MEMORY_MAX_BYTES
        is_alone = not self._held_bytes
        return (is_small or is_alone) and self._taken[place.model] < self._limit_of(place.model)
