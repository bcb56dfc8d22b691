"""The instances and the line of one model: who gets which slot when. No I/O, no waiting.

Whatever may let somebody in (a slot that is free, an instance admitted, a request that joined)
ends in `settle`: as long as there is a free slot, those in line are asked in turn which one they
take. Who would rather wait for its home stays in its place and holds up nobody behind it; that it
would leave at some time is the one thing that happens without an event, and has a timer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from proxy.errors import LineFull
from proxy.home.affinity import Affinity
from proxy.line.lease import Clock, Lease
from proxy.line.line import Line
from proxy.line.rates import Timings, average
from proxy.line.seats import Seat, Seats
from proxy.line.waiter import View, Waiter
from proxy.request import Ask
from proxy.settings import ProxySettings

# How long a request holds a slot, before any has been seen to.
_HELD_S: Final = 2.0
_RETRY_MAX_S: Final = 120
_ALARM_MIN_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class LineFacts:
    """What is known of a line at one moment.

    Attributes:
        interactive: Requests that wait in the first lane.
        batch: Requests that wait in the second.
        oldest_wait_s: How long the one that has waited longest has waited.
        expected_wait_s: How long one that joins now may expect to wait.
    """

    interactive: int
    batch: int
    oldest_wait_s: float
    expected_wait_s: float


class Pool:
    """One model's instances and line.

    Args:
        model: The id of the model.
        seats: All instances; those of other models are left alone.
        affinity: What is believed of their caches.
        settings: The policy, and how long the line may be.
        clock: Monotonic time.

    Attributes:
        model: As given.
        admissions: How many times an instance was admitted.
        is_held: Whether all wait in line, even where a slot is free.
        ended_at_s: When an instance here last ended a request; minus infinity before the first.
        idled: Called when nobody waits and nothing is held here any more.
        proved: As `Dispatch.proved`.
    """

    def __init__(
        self, model: str, seats: Seats, affinity: Affinity, settings: ProxySettings, clock: Clock
    ) -> None:
        self.admissions = 0
        self.model = model
        self.is_held = False
        self.ended_at_s = -math.inf
        self.idled: Callable[[], None] = lambda: None
        self.proved: Callable[[str, int, Timings], None] = lambda *_: None
        self._seats = seats
        self._affinity = affinity
        self._settings = settings
        self._clock = clock
        self._line: Line[Waiter] = Line()
        self._promised: dict[Lease, Waiter] = {}
        self._held_s = _HELD_S
        self._alarm: asyncio.TimerHandle | None = None

    # Those who wait.

    def join(self, waiter: Waiter) -> None:
        """Give a request a slot, or else a place in line.

        Raises:
            LineFull: There is neither.
        """
        if not len(self._line) and self._serve_one_of((waiter,)):
            return
        self._line.join(waiter)
        self.settle()
        if waiter.lease is not None:
            return
        waiter.position = self._line.position(waiter, self._clock())
        if len(self._line) > self._settings.line_max and not waiter.ask.is_let_in:
            self._line.leave(waiter)
            ahead = f"{len(self._line)} requests wait for {self.model} already"
            raise LineFull(f"{ahead}; ask again later", self.retry_after_s)

    def leave(self, waiter: Waiter) -> None:
        """Give up a place, and a slot that was given but not used; else do nothing."""
        self._line.leave(waiter)
        if waiter.lease in self._promised:
            for lease in waiter.lease.slots:
                self.free(lease)
        elif waiter.lease is None and waiter.ask.slots > 1:
            self.settle()  # slots may have been kept for it

    def begin(self, waiter: Waiter) -> None:
        """Note that the slot that a request was given is used from now on."""
        if waiter.lease:
            self._promised.pop(waiter.lease, None)

    @property
    def retry_after_s(self) -> int:
        """Return after how many whole seconds it is worth to ask again, 1 to 120."""
        return min(max(1, math.ceil(self._expected_wait_s)), _RETRY_MAX_S)

    def facts(self) -> LineFacts:
        """Return what is known of the line."""
        has_room = any(seat.has_room for seat in self._seats.admitted(self.model))
        return LineFacts(
            self._line.waiting("interactive"),
            self._line.waiting("batch"),
            self._line.oldest_wait_s(self._clock()),
            0.0 if has_room else self._expected_wait_s,
        )

    # The instances.

    def serves(self, ask: Ask) -> bool:
        """Return whether an instance is admitted that may take a request."""
        return any(seat.may_take(ask) for seat in self._seats.admitted(self.model))

    def admitted(self) -> None:
        """Note that an instance was admitted."""
        self.admissions += 1
        self.settle()

    def withdrawn(self, seat: Seat) -> None:
        """Note that an instance is withdrawn: who was promised a slot of it goes back in line."""
        for lease in tuple(seat.leases):
            if waiter := self._promised.pop(lease, None):
                for one in lease.slots:
                    seat.leases.remove(one)
                waiter.lease = None
                waiter.woken.clear()
                self._line.join(waiter)
            elif lease.is_ending:
                seat.leases.remove(lease)
        self._seats.forget(seat)
        self.settle()
        for waiter in self._line.order(self._clock()):
            if not self.serves(waiter.ask):
                waiter.woken.set()

    def free(self, lease: Lease) -> None:
        """Take a slot back, and give it to the next; nothing where it is back already."""
        self._promised.pop(lease, None)
        if lease in lease.seat.leases:
            lease.seat.leases.remove(lease)
            if lease.berth:
                self._affinity.berths(lease.upstream.name).leave(lease, self._clock())
            self._seats.forget(lease.seat)
            if not (lease.upstream.node or lease.ask.is_ours):
                self.ended_at_s = self._clock()
            self.settle()
            if not self.working:
                self.idled()

    @property
    def working(self) -> int:
        """Return how many clients' requests its instances here hold, those included that leave."""
        here = (seat for seat in self._seats if not seat.upstream.node)
        leases = (seat.leases for seat in here if seat.upstream.model == self.model)
        return sum(not lease.ask.is_ours for held in leases for lease in held)

    def learn(self, lease: Lease, timings: Timings | None, mark: int | None) -> None:
        """Take in what came of a request, and by what its next turn will be known."""
        prompt, name = lease.ask.prompt, lease.upstream.name
        self._held_s = average(self._held_s, self._clock() - lease.began_at_s)
        if timings:
            lease.seat.rates = lease.seat.rates.after(timings)
        if timings and prompt:
            self._affinity.correct(name, lease.expected_cached, timings.cached_tokens)
            self._affinity.holds(name, prompt.blocks)
            if lease.berth and lease.is_proof:
                self.proved(name, lease.berth.slot, timings)
            if lease.berth and lease.talk:
                held = timings.cached_tokens + timings.prompt_tokens + timings.decoded_tokens
                self._affinity.berths(name).know(lease.berth, lease.talk, held, prompt.blocks)
        if mark is not None and prompt:
            self._affinity.answered(prompt, mark)

    # Who is next.

    def settle(self) -> None:
        """Give free slots to those in line, as long as there are both."""
        if self._alarm:
            self._alarm.cancel()
            self._alarm = None
        while len(self._line) and (waiter := self._serve_one_of(self._line.order(self._clock()))):
            self._line.take(waiter)

    def _serve_one_of(self, waiters: Iterable[Waiter]) -> Waiter | None:
        """Give a free slot to the first of those who take one; return who that was."""
        seats, now_s = self._seats.answering(self.model), self._clock()
        view = View(seats, self._affinity, self._settings.policy, held_s=self._held_s, now_s=now_s)
        if self.is_held or not view.has_room:
            return None
        soonest_s = math.inf
        for waiter in waiters:
            choice = view.choice(waiter)
            if choice.name is not None:
                self._give(waiter, next(s for s in seats if s.upstream.name == choice.name), now_s)
                return waiter
            if choice.leaves_in_s is not None:
                soonest_s = min(soonest_s, choice.leaves_in_s)
        self._set_alarm(soonest_s)
        return None

    def _give(self, waiter: Waiter, seat: Seat, now_s: float) -> None:
        prompt = waiter.ask.prompt
        lease = Lease(waiter.ask, seat, self._clock, self)
        lease.waited_s = now_s - waiter.joined_at_s
        lease.position = waiter.position
        lease.expected_cached = self._affinity.cached_tokens(seat.upstream.name, prompt)
        if prompt:
            lease.talk = self._affinity.settle(seat.upstream, prompt, waiter.session)
        lease.beside = tuple(
            Lease(waiter.ask, seat, self._clock, self, first=lease)
            for _ in range(seat.needed(waiter.ask) - 1)
        )
        self._seats.ask(seat)
        seat.leases += lease.slots
        self._promised[lease] = waiter
        waiter.lease = lease
        waiter.woken.set()

    def _set_alarm(self, in_s: float) -> None:
        if in_s < math.inf:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(in_s, _ALARM_MIN_S), self.settle)

    @property
    def _expected_wait_s(self) -> float:
        slots = sum(seat.upstream.slots for seat in self._seats.admitted(self.model))
        return self._held_s * (len(self._line) + 1) / max(1, slots)
