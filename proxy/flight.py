"""Requests under way: counted, waited for, and cut from outside.

A flight is one request between its first byte and its last. Whoever holds it (the instance that
answers it, the server that drains) can cut it: the task that carries it then meets the given error
at the point where it waits, and closes what it opened on its way out. All changes are made in
methods without `await`; only `idle` waits, and it wakes by event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from proxy.errors import ProxyError


class Flight:
    """One request under way; made by `flying`.

    Attributes:
        cut_by: The error it was cut with, or None.
        is_awaited: Whether the next step is the instance's, and not the client's.
    """

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self.cut_by: ProxyError | None = None
        self.is_awaited = True

    def cut(self, error: ProxyError) -> None:
        """End it with this error. The first cut counts, later ones change nothing."""
        if self.cut_by is None:
            self.cut_by = error
            self._scope.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def flying() -> AsyncIterator[Flight]:
    """Let the block be cut from outside.

    Raises:
        ProxyError: What it was cut with.
    """
    # A timeout without a limit is the one tool of asyncio that cancels a block from outside
    # and still tells that apart from the task's own cancellation: here, a client that left.
    scope = asyncio.timeout(None)
    flight = Flight(scope)
    try:
        async with scope:
            yield flight
    except TimeoutError:
        if flight.cut_by is None:
            raise
        raise flight.cut_by from None


class Flights:
    """The requests that one holder has under way."""

    def __init__(self) -> None:
        self._flights: set[Flight] = set()
        self._landed = asyncio.Event()
        self._landed.set()

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def awaited(self) -> int:
        """Return how many of them wait for an instance."""
        return sum(flight.is_awaited for flight in self._flights)

    @contextmanager
    def holding(self, flight: Flight) -> Iterator[None]:
        """Count a flight for the length of the block, which must lie inside its `flying`."""
        self._flights.add(flight)
        self._landed.clear()
        try:
            yield
        finally:
            self._flights.discard(flight)
            if not self._flights:
                self._landed.set()

    def cut(self, error: ProxyError) -> None:
        """End every flight with this error."""
        for flight in self._flights:
            flight.cut(error)

    async def idle(self) -> None:
        """Wait until none is under way. Without limit: the caller knows its own patience."""
        await self._landed.wait()


class Floor:
    """All that the server has under way, and whether it takes more.

    Attributes:
        flights: The requests that are passed to instances.
        is_shut: Whether every further request is refused.
    """

    def __init__(self) -> None:
        self.flights = Flights()
        self.is_shut = False
