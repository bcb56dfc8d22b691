"""A request that waits for its turn, and what it makes of the instances it sees."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.home.affinity import Affinity
from proxy.home.prefix import session_mark
from proxy.line.choose import Candidate, Choice, choose
from proxy.line.lease import Lease
from proxy.line.line import Place
from proxy.line.seats import Seat
from proxy.request import Ask
from proxy.settings import Policy


@dataclass(slots=True, eq=False, kw_only=True)
class Waiter(Place):
    """A request in line.

    Attributes:
        ask: The request.
        avoid: Names of instances to take only if there is no other.
        session: The mark of the client's own name for the conversation, or None.
        lease: What it got, or None.
        position: Its place when it joined, 1 for the next in turn; 0 if it got a slot at once.
        woken: Set when it got a lease, and when nobody is left who could give it one.
    """

    ask: Ask
    avoid: Collection[str] = ()
    session: int | None = None
    lease: Lease | None = None
    position: int = 0
    woken: asyncio.Event = field(default_factory=asyncio.Event)


def waiter_for(ask: Ask, avoid: Collection[str], now_s: float) -> Waiter:
    """Return a request as one that begins to wait now."""
    return Waiter(
        client=ask.client,
        lane=ask.lane,
        joined_at_s=now_s,
        patience_s=ask.patience_s,
        ask=ask,
        avoid=avoid,
        session=session_mark(ask.model, ask.client, ask.session) if ask.session else None,
    )


class View:
    """The instances of one model at one moment, as those who wait see them, one after the other.

    Args:
        seats: Those that are admitted.
        affinity: What is believed of their caches.
        policy: The rule by which is chosen.
        held_s: How long a request holds a slot, on average.
        now_s: The moment.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        affinity: Affinity,
        policy: Policy,
        *,
        held_s: float,
        now_s: float,
    ) -> None:
        self._seats = seats
        self._affinity = affinity
        self._policy = policy
        self._held_s = held_s
        self._now_s = now_s
        self._homes: Mapping[str, int] | None = None
        self._bound_for: Counter[str] = Counter()
        self._kept: set[Seat] = set()

    @property
    def has_room(self) -> bool:
        """Return whether any slot is free."""
        return any(seat.has_room for seat in self._seats)

    def choice(self, waiter: Waiter) -> Choice:
        """Return what a request would do; those who wait for their home are remembered."""
        ask = waiter.ask
        seats = [one for one in self._seats if one.may_take(ask) and one not in self._kept]
        if len(seats) == 1 and seats[0].has_room_for(ask):  # as it is with most models
            return Choice(seats[0].upstream.name)
        prompt = waiter.ask.prompt
        policy = "least-busy" if prompt is None and self._policy == "affinity" else self._policy
        home = self._affinity.home(prompt, waiter.session) if policy == "affinity" else None
        others = [seat for seat in seats if seat.upstream.name not in waiter.avoid]
        candidates = [self._candidate(seat, waiter) for seat in others or seats]
        tokens = prompt.tokens if prompt else 0
        choice = choose(policy, candidates, tokens, home, self._now_s - waiter.joined_at_s)
        if choice.name is None and home is not None:
            self._bound_for[home] += 1
        if choice.name is None and ask.slots > 1:
            self._keep(seats, ask, home)
        return choice

    def _keep(self, seats: Sequence[Seat], ask: Ask, home: str | None) -> None:
        """Keep an instance's slots for a request that needs several.

        Those behind it would else take each slot as it falls free. It is its home's, or that of
        which the fewest are missing.
        """
        if seats:
            self._kept.add(
                min(seats, key=lambda one: (one.upstream.name != home, one.needed(ask) - one.free))
            )

    def _candidate(self, seat: Seat, waiter: Waiter) -> Candidate:
        name, slots = seat.upstream.name, seat.upstream.slots
        if self._homes is None:
            self._homes = self._affinity.homes(seat.upstream.model)
        turns = 0 if seat.has_room_for(waiter.ask) else 1 + self._bound_for[name]
        return Candidate(
            name=name,
            slots=slots,
            taken=len(seat.leases),
            turn=seat.turn,
            homes=self._homes.get(name, 0),
            cached_tokens=self._affinity.cached_tokens(name, waiter.ask.prompt),
            backlog_tokens=seat.backlog_tokens,
            prefill_tps=seat.rates.prefill_tps,
            free_in_s=turns * self._held_s / slots,
            is_spare=seat.upstream.node is not None and seat.upstream.node.is_spare,
            needed=seat.needed(waiter.ask),
        )
