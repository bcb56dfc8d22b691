"""Which instance answers which request: admitted, withdrawn, leased, idle, closed.

A lease is the right to use one slot of one instance for one request. An instance that is withdrawn
gets no new lease and keeps those it has. Among the admitted instances of a model the least busy
one is chosen: fewest leases for each slot, ties to the one whose last lease lies furthest back.
What comes from an instance is counted here too, for whoever has to know whether it is alive.
Everything but `idle`, `close` and the length of a lease happens in methods without `await`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, Protocol

from proxy.errors import Unavailable, UpstreamStopped
from proxy.flight import Flight, Flights, flying
from proxy.upstream import Upstream

# An engine's HTTP threads send `:` lines in an open stream whether or not it still computes.
# Source: llama-server --sse-ping-interval; WHATWG HTML, section "Interpreting an event stream".
_PING: Final = b":\r\n "


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What clients may know of a model.

    Attributes:
        id: The name clients use.
        aliases: Other names clients may use.
        state: `loaded` can answer now; `loading` is on its way; `unloaded` is loaded when asked
            for; `failed` cannot answer until somebody acts.
        created: Unix time in whole seconds; the same for the life of the model's entry.
        context_length: Tokens that one request may use, or None where not known yet.
        slots: Sequences that are decoded at once over all instances; 0 where not known yet.
        reason: Why it failed, in a sentence, or None.
    """

    id: str
    aliases: tuple[str, ...]
    state: Literal["loaded", "loading", "unloaded", "failed"]
    created: int
    context_length: int | None
    slots: int
    reason: str | None = None


class Loader(Protocol):
    """What the proxy needs of whoever runs the instances."""

    def models(self) -> Sequence[ModelCard]:
        """Return every configured model, in the order of the settings."""

    async def ensure_ready(self, model: str) -> None:
        """Return once an instance of the model is admitted.

        Raises:
            ProxyError: It will not be: Loading, Unavailable or UpstreamFailed say why.
        """


@dataclass(slots=True)
class _Seat:
    """An instance and the requests it holds."""

    upstream: Upstream
    is_admitted: bool = True
    leased_at: int = 0
    bytes_heard: int = 0
    flights: Flights = field(default_factory=Flights)

    @property
    def is_over(self) -> bool:
        return not self.is_admitted and not self.flights


@dataclass(frozen=True, slots=True)
class Pulse:
    """What an instance does for us at one moment.

    Attributes:
        held: Requests it holds.
        awaited: Those of them whose next bytes are the instance's to send; for the others, a client
            has yet to take what was sent.
        bytes_heard: Bytes of answers that came from it so far, pings not counted; never less while
            it is admitted or holds a request.
    """

    held: int = 0
    awaited: int = 0
    bytes_heard: int = 0


class Lease:
    """The right to use one slot of one instance for one request; made by `Dispatch.lease`.

    Attributes:
        upstream: The instance.
    """

    def __init__(self, seat: _Seat, flight: Flight) -> None:
        self.upstream = seat.upstream
        self._seat = seat
        self._flight = flight

    def hear(self, chunk: bytes) -> None:
        """Note bytes of the answer; until `listen`, it is for the client to go on."""
        self._flight.is_awaited = False
        if chunk.strip(_PING):
            self._seat.bytes_heard += len(chunk)

    def listen(self) -> None:
        """Note that the client took them: it is for the instance to go on."""
        self._flight.is_awaited = True


class Dispatch:
    """The instances that may be asked, and what each of them is doing."""

    def __init__(self) -> None:
        self._seats: dict[str, _Seat] = {}
        self._turn = count(1)

    def admit(self, upstream: Upstream) -> None:
        """Let an instance be asked from now on; facts of an earlier admission are replaced."""
        seat = self._seats.setdefault(upstream.name, _Seat(upstream))
        seat.upstream = upstream
        seat.is_admitted = True

    def withdraw(self, name: str) -> None:
        """Give an instance no more requests; those that it holds go on. Unknown names are fine."""
        if seat := self._seats.get(name):
            seat.is_admitted = False
            self._forget(seat)

    def serves(self, model: str) -> bool:
        """Return whether an instance of the model may be asked now."""
        return any(seat.upstream.model == model for seat in self._admitted())

    def busy(self, name: str) -> int:
        """Return how many requests an instance holds; 0 where there is no such instance."""
        seat = self._seats.get(name)
        return len(seat.flights) if seat else 0

    def pulse(self, name: str) -> Pulse:
        """Return what an instance does for us; nothing where there is no such instance."""
        seat = self._seats.get(name)
        if seat is None:
            return Pulse()
        return Pulse(len(seat.flights), seat.flights.awaited, seat.bytes_heard)

    async def idle(self, name: str) -> None:
        """Wait until an instance holds no request. Without limit: `close` ends the wait."""
        if seat := self._seats.get(name):
            await seat.flights.idle()

    async def close(self, name: str) -> None:
        """Withdraw an instance and cut what it holds; return when its connections are closed."""
        self.withdraw(name)
        if seat := self._seats.get(name):
            seat.flights.cut(UpstreamStopped(name))
            await seat.flights.idle()

    @asynccontextmanager
    async def lease(self, model: str, avoid: Collection[str] = ()) -> AsyncIterator[Lease]:
        """Hold one slot of the least busy instance for the length of the block.

        Args:
            model: The id of the model.
            avoid: Names of instances to take only if there is no other.

        Raises:
            Unavailable: No instance of the model is admitted.
            UpstreamStopped: `close` cut the block.
        """
        seat = self._least_busy(model, avoid)
        seat.leased_at = next(self._turn)
        try:
            async with flying() as flight:
                with seat.flights.holding(flight):
                    yield Lease(seat, flight)
        finally:
            self._forget(seat)

    def _least_busy(self, model: str, avoid: Collection[str]) -> _Seat:
        seats = [seat for seat in self._admitted() if seat.upstream.model == model]
        if not seats:
            raise Unavailable(f"no instance of {model} is ready; ask again")
        fresh = [seat for seat in seats if seat.upstream.name not in avoid]
        return min(fresh or seats, key=lambda s: (len(s.flights) / s.upstream.slots, s.leased_at))

    def _admitted(self) -> Iterable[_Seat]:
        return (seat for seat in self._seats.values() if seat.is_admitted)

    def _forget(self, seat: _Seat) -> None:
        if seat.is_over:
            self._seats.pop(seat.upstream.name, None)
