"""The instances that the proxy was told of, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from proxy.engine.upstream import Upstream
from proxy.line.flight import Flights
from proxy.line.rates import Rates

if TYPE_CHECKING:
    from proxy.line.lease import Lease, LeaseFacts
    from proxy.request import Ask


@dataclass(frozen=True, slots=True)
class Pulse:
    """What an instance does for us at one moment.

    Attributes:
        held: Requests it holds.
        awaited: Those of them whose next bytes are the instance's to send; for the others, a client
            has yet to take what was sent.
        bytes_heard: Bytes of answers that came from it so far, pings not counted; never less while
            it is admitted or holds a request.
        is_silent: Whether it does not answer `/health`.
    """

    held: int = 0
    awaited: int = 0
    bytes_heard: int = 0
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class SeatFacts:
    """What is known of an instance at one moment.

    Attributes:
        upstream: The instance.
        is_admitted: Whether it may be given requests.
        homes: Conversations it is home to, of the latest ones.
        prefill_tps: Tokens of prompts it computes each second; 0 before its first answer.
        decode_tps: Tokens it generates each second for a request; 0 before its first answer.
        leases: Its slots that are in use.
        acceptance: Share of the tokens it guesses ahead that come true, 0 to 1; None before any.
    """

    upstream: Upstream
    is_admitted: bool
    homes: int
    prefill_tps: float
    decode_tps: float
    leases: tuple[LeaseFacts, ...]
    acceptance: float | None = None


@dataclass(slots=True, eq=False)
class Seat:
    """An instance, the requests it holds, and its slots in use.

    A slot may be in use longer than its request lasts (the engine has yet to stop), or shorter
    (the client has yet to take the end of the answer).

    Attributes:
        upstream: The instance.
        rates: How fast it is.
        is_admitted: Whether it may be given requests.
        is_silent: Whether it does not answer; it is then given none that another can take.
        turn: When it was last given one, in the count of `Seats`.
        bytes_heard: Bytes of answers that came from it.
        flights: The requests it holds.
        leases: Its slots in use, at most as many as it has.
        computed: The requests that were sent to it and are not answered yet.
    """

    upstream: Upstream
    rates: Rates
    is_admitted: bool = True
    is_silent: bool = False
    turn: int = 0
    bytes_heard: int = 0
    flights: Flights = field(default_factory=Flights)
    leases: list[Lease] = field(default_factory=list)
    computed: list[Lease] = field(default_factory=list)

    @property
    def pulse(self) -> Pulse:
        """Return what it does for us now."""
        return Pulse(len(self.flights), self.flights.awaited, self.bytes_heard, self.is_silent)

    @property
    def has_room(self) -> bool:
        """Return whether a slot is free."""
        return len(self.leases) < self.upstream.slots

    def has_room_for(self, ask: Ask) -> bool:
        """Return whether as many slots are free as a request uses here."""
        return self.free >= self.needed(ask)

    @property
    def free(self) -> int:
        """Return how many slots are free."""
        return self.upstream.slots - len(self.leases)

    def needed(self, ask: Ask) -> int:
        """Return how many slots a request uses here."""
        return min(ask.slots, self.upstream.slots)

    def may_take(self, ask: Ask) -> bool:
        """Return whether a request may come here: one that was passed on stays on this machine."""
        return not (ask.is_hopped and self.upstream.node)

    @property
    def ending(self) -> list[Lease]:
        """Return the slots in use whose requests are over, the oldest first."""
        return [lease for lease in self.leases if lease.is_ending]

    @property
    def backlog_tokens(self) -> int:
        """Return how many tokens of prompts it still has to compute."""
        return sum(lease.backlog_tokens for lease in self.leases)

    def facts(self, homes: int) -> SeatFacts:
        """Return what is known of it, with the number of its homes."""
        known = bool(self.rates.answers)
        return SeatFacts(
            self.upstream,
            self.is_admitted,
            homes,
            self.rates.prefill_tps if known else 0.0,
            self.rates.decode_tps if known else 0.0,
            tuple(lease.facts() for lease in self.leases),
            self.rates.acceptance,
        )


class Seats:
    """All instances by name: those admitted, and those that still hold something."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._rates: dict[str, Rates] = {}  # of those that are gone for now
        self._turn = count(1)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def get(self, name: str) -> Seat | None:
        """Return an instance, or None where there is none of the name."""
        return self._seats.get(name)

    def admitted(self, model: str) -> list[Seat]:
        """Return the instances of a model that may be given requests."""
        return [seat for seat in self if seat.is_admitted and seat.upstream.model == model]

    def answering(self, model: str) -> list[Seat]:
        """Return those of them that are not silent; all of them where all are."""
        admitted = self.admitted(model)
        return [seat for seat in admitted if not seat.is_silent] or admitted

    def admit(self, upstream: Upstream) -> Seat:
        """Let an instance be given requests; facts of an earlier admission are replaced."""
        rates = self._rates.get(upstream.name, Rates())
        seat = self._seats.setdefault(upstream.name, Seat(upstream, rates))
        seat.upstream = upstream
        seat.is_admitted = True
        return seat

    def ask(self, seat: Seat) -> None:
        """Note that an instance is given a request."""
        seat.turn = next(self._turn)

    def forget(self, seat: Seat) -> None:
        """Forget an instance that is withdrawn and holds nothing; else do nothing."""
        if not (seat.is_admitted or seat.flights or seat.leases):
            self._rates[seat.upstream.name] = seat.rates
            self._seats.pop(seat.upstream.name, None)
