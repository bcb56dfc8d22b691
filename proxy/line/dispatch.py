"""Which instance answers which request: admitted, withdrawn, waited for, leased, idle, closed.

A lease is the right to use one slot of one instance for one request; an instance has as many as it
has slots, so no request ever waits inside an engine. Who finds no slot free waits in the model's
line; who finds no instance at all waits there too, while the loader brings one up. An instance that
is withdrawn gets no new lease and keeps those it has. What comes from an instance is counted here
too, for whoever has to know whether it is alive.

All that changes, changes in methods without `await`, most of it in `proxy.line.pool`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from proxy.engine.slots import Reach, Seen
from proxy.engine.upstream import Upstream
from proxy.errors import NotLoaded, UpstreamStopped, UpstreamUnreached
from proxy.home.affinity import Affinity
from proxy.home.chain import Chain, Filled
from proxy.line.boarding import Boarding
from proxy.line.computation import Computation
from proxy.line.flight import Flight
from proxy.line.lease import Clock, Lease
from proxy.line.pool import LineFacts, Pool
from proxy.line.rates import Timings
from proxy.line.reclaim import Count, Reclaim, slots_in_use
from proxy.line.seats import Pulse, Seat, SeatFacts, Seats
from proxy.line.silence import IsThere, Silence, answers_health
from proxy.line.suspects import Suspects
from proxy.line.turn import served, turn
from proxy.line.waiter import waiter_for
from proxy.loader import Loader
from proxy.record import Tell
from proxy.request import Ask
from proxy.settings import ProxySettings


@dataclass(frozen=True, slots=True)
class Demand:
    """What clients have and want of a model at one moment, other machines aside.

    Attributes:
        waiting: Requests in its line.
        working: Requests that its instances here hold.
        ended_at_s: When the last of them ended; minus infinity before the first.
        cached_tokens: Tokens of conversations that its slots are believed to hold.
    """

    waiting: int
    working: int
    ended_at_s: float
    cached_tokens: int


class Dispatch:
    """The instances that may be asked, what each of them is doing, and who waits for them.

    Args:
        settings: The policy, and how long a line may be.
        clock: Monotonic time.
        count: Asks an instance how many of its slots are in use; None for the usual way.
        is_there: Asks an instance whether it is there; None for the usual way.

    Attributes:
        loader: Brings models up; without one, a model that is not up is unavailable.
        tell: Hears of slots that an engine does not give back.
        overdue: Called with an instance, and with what happened in a sentence, when its engine goes
            on computing for a request that is over longer than `cancel_timeout_s`.
        idled: Called when a model holds no request any more.
        unreached: Called when an instance did not begin to answer a request.
        proved: Called with an instance, a slot that it began with, and what the prompt cost that
            went on there first.
    """

    def __init__(
        self,
        settings: ProxySettings = ProxySettings(),  # noqa: B008 (frozen)
        clock: Clock = time.monotonic,
        count: Count | None = None,
        is_there: IsThere | None = None,
    ) -> None:
        self.loader: Loader | None = None
        self.tell: Tell | None = None
        self.overdue: Callable[[Upstream, str], None] = lambda *_: None
        self.idled: Callable[[], None] = lambda: None
        self.unreached: Callable[[Upstream, UpstreamUnreached], None] = lambda *_: None
        self.proved: Callable[[str, int, Timings], None] = lambda *_: None
        self._settings = settings
        self._clock = clock
        self._seats = Seats()
        self._affinity = Affinity(settings.index_max)
        self._suspects = Suspects(clock, settings.crash_memory_s)
        self._pools: dict[str, Pool] = {}
        self._reclaim = Reclaim(
            count or slots_in_use(settings), clock, settings.cancel_timeout_s, self._tell_overdue
        )
        self._silence = Silence(self._seats, is_there or answers_health(settings), self._settle)

    # What whoever runs the instances tells and asks.

    def admit(self, upstream: Upstream, filled: Iterable[Filled] = ()) -> None:
        """Let an instance be asked from now on; facts of an earlier admission are replaced.

        Args:
            upstream: The instance.
            filled: Its slots as its process began with them.
        """
        self._affinity.meet(upstream, filled)
        self._seats.admit(upstream)
        self._pool(upstream.model).admitted()

    def withdraw(self, name: str) -> None:
        """Give an instance no more requests; those that it holds go on. Unknown names are fine."""
        if seat := self._seats.get(name):
            seat.is_admitted = False
            self._pool(seat.upstream.model).withdrawn(seat)

    def serves(self, model: str) -> bool:
        """Return whether an instance of the model may be asked now."""
        return bool(self._seats.admitted(model))

    def busy(self, name: str) -> int:
        """Return how many requests an instance holds; 0 where there is no such instance."""
        return self.pulse(name).held

    def pulse(self, name: str) -> Pulse:
        """Return what an instance does for us; nothing where there is no such instance."""
        seat = self._seats.get(name)
        return seat.pulse if seat else Pulse()

    def ended(self, name: str, *, is_crash: bool) -> int:
        """Hear that the process of an instance is gone; unknown names are fine.

        To be told of each process that was admitted with `tells_its_end`, before it is withdrawn.

        Args:
            name: The instance.
            is_crash: Whether a signal ended it that nobody here sent.

        Returns:
            How many requests of clients it computed, those included whose clients have left.
        """
        seat = self._seats.get(name)
        leases = {*seat.computed, *seat.ending} if seat else set()
        for lease in leases:
            lease.ending_of_process.tell(is_crash=is_crash)
        # One request may hold several slots.
        asks = {id(lease.ask): lease.ask for lease in leases if not lease.ask.is_ours}
        if is_crash:
            self._suspects.crashed(asks.values())
        return len(asks)

    async def idle(self, name: str) -> None:
        """Wait until an instance holds no request. Without limit: `close` ends the wait."""
        if seat := self._seats.get(name):
            await seat.flights.idle()

    async def close(self, name: str) -> None:
        """Withdraw an instance and cut what it holds; return when its connections are closed."""
        seat = self._seats.get(name)
        self.withdraw(name)
        if seat:
            seat.flights.cut(UpstreamStopped(name))
            await seat.flights.idle()

    def hold(self, model: str) -> None:
        """Have all requests for a model wait in line, even where a slot is free."""
        self._pool(model).is_held = True

    def release(self, model: str) -> None:
        """Let them go on. A model that is not held is fine."""
        pool = self._pool(model)
        pool.is_held = False
        pool.settle()

    def demand(self, model: str) -> Demand:
        """Return what clients have and want of a model."""
        pool, facts = self._pool(model), self._pool(model).facts()
        cached = sum(
            self._affinity.berths(seat.upstream.name).tokens for seat in self._seats.admitted(model)
        )
        return Demand(facts.interactive + facts.batch, pool.working, pool.ended_at_s, cached)

    def chains(self, name: str, page: Sequence[Seen]) -> Mapping[int, Chain]:
        """Return what tells the conversations in an instance's idle slots, as far as known.

        Args:
            name: The instance; unknown names are fine.
            page: Its slots, as it tells of them now.
        """
        return self._affinity.chains(name, page, self._clock())

    async def tend(self) -> None:
        """Look after slots of requests that were cut, and silent instances; until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._silence.serve())
            await self._reclaim.serve()

    # What is known.

    def seats(self) -> tuple[SeatFacts, ...]:
        """Return every instance that is admitted or holds something."""
        return tuple(
            seat.facts(self._affinity.homes(seat.upstream.model).get(seat.upstream.name, 0))
            for seat in self._seats
        )

    def lines(self) -> Mapping[str, LineFacts]:
        """Return the line of every model that was asked for."""
        return {model: pool.facts() for model, pool in self._pools.items()}

    # A request.

    @asynccontextmanager
    async def lease(self, ask: Ask, avoid: Collection[str] = ()) -> AsyncIterator[Lease]:
        """Hold one slot of an instance for the length of the block, after a wait if need be.

        What needs no slot takes none, and waits in no line. The slot is free again at once when
        the lease is complete; else once the engine has confirmed that it is idle.

        Args:
            ask: The request; it waits no longer than its patience.
            avoid: Names of instances to take only if there is no other.

        Raises:
            LineFull: Too many wait already.
            WaitedLong: Its patience ended before its turn came.
            Loading: Its patience ended before an instance was up.
            CrashesEngine: It is refused, for engines crashed while they computed it.
            NotLoaded: No instance is up, and the request only looks.
            Unavailable: No instance is up, and none will be; so may the loader's own errors say.
            UpstreamStopped: `close` cut the block.
            UpstreamSilent: The instance is not there; another has a slot free.
        """
        self._suspects.check(ask)
        pool = self._pool(ask.model)
        if ask.kind.takes_slot:
            lease = await turn(pool, waiter_for(ask, avoid, self._clock()), self.loader)
        else:
            lease = await self._look(ask, avoid)
        seat = lease.seat
        try:
            async with Flight(seat.flights) as flight:
                lease.fly(flight)
                self._silence.watch(lease)
                yield lease
        except UpstreamUnreached as error:
            for one in lease.slots:
                pool.free(one)
            self.unreached(lease.upstream, error)
            raise
        finally:
            self._silence.forget(lease)
            for one in lease.slots:
                if one in seat.leases:
                    self._reclaim.watch(one, pool.free)
            self._seats.forget(seat)

    def answered(self, lease: Lease) -> None:
        """Note that the header of its answer is there."""
        self._silence.forget(lease)

    async def slot(self, lease: Lease, reach: Reach) -> int | None:
        """Return the slot that a request should name, or None for whichever the engine takes.

        To be asked once for each lease, right before the request goes out.

        Args:
            lease: Its lease.
            reach: How the request could come to a certain one.
        """
        upstream = lease.upstream
        is_followed = self._settings.policy == "affinity" and upstream.can_name_slots
        if not is_followed or not lease.ask.kind.takes_slot:
            return None
        berths = self._affinity.berths(upstream.name)
        slot = await Boarding(lease, berths, self._settings, self._clock).board(reach)
        for one in lease.beside:
            if berth := berths.board(one, None, self._clock()):
                one.berth = berth
                berths.depart(berth)
        return slot

    def computation(self, lease: Lease) -> Computation:
        """Return what a request is to be sent in, and its answer read."""
        return Computation(lease, self._suspects)

    async def _look(self, ask: Ask, avoid: Collection[str]) -> Lease:
        """Return the right to ask what takes no slot, of whoever is least busy."""
        pool = self._pool(ask.model)
        if ask.may_load:
            await served(pool, ask, self.loader)
        elif not pool.serves(ask):
            raise NotLoaded(ask.model)
        seats = [seat for seat in self._seats.answering(ask.model) if seat.may_take(ask)]
        fresh = [seat for seat in seats if seat.upstream.name not in avoid]
        return Lease(ask, min(fresh or seats, key=_calm), self._clock)

    def _pool(self, model: str) -> Pool:
        if model not in self._pools:
            self._pools[model] = Pool(
                model, self._seats, self._affinity, self._settings, self._clock
            )
            self._pools[model].idled = self._idled
            self._pools[model].proved = self._proved
        return self._pools[model]

    def _settle(self, model: str) -> None:
        self._pool(model).settle()

    def _idled(self) -> None:
        self.idled()  # whoever is told may be known later than the pool is made

    def _proved(self, name: str, slot: int, timings: Timings) -> None:
        self.proved(name, slot, timings)

    def _tell_overdue(self, lease: Lease) -> None:
        limit_s = self._settings.cancel_timeout_s
        why = f"still computes for a request that ended {limit_s:g} s ago"
        if self.tell:
            self.tell(
                "upstream.broke",
                request=lease.ask.request_id,
                model=lease.ask.model,
                instance=lease.upstream.name,
                phase="end",
                error=f"{lease.upstream.name} {why}",
            )
        self.overdue(lease.upstream, why)


def _calm(seat: Seat) -> tuple[bool, float, int]:
    """Return whether an instance is spare, how busy it is, and when it was last asked."""
    node = seat.upstream.node
    return bool(node and node.is_spare), len(seat.flights) / seat.upstream.slots, seat.turn
