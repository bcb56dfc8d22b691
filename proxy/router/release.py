"""Frees the slots of requests that ended before their response did, once the slots are idle.

After a client has left, an engine computes to the end of the batch, which may take seconds. If its
slot were leased meanwhile, the next request would wait inside the engine. So the engine is asked
for its busy slots: soon at first, then less and less often, because a query each second keeps an
engine from noticing that other clients have left.

If an engine does not report its slots, they are freed anyway. A slot that is not idle within
`cancel_timeout_s` is reported once, and stays in use until it is idle or its instance is withdrawn.

Source: `/slots` of builds 10434 and 11434, measured. A grammar of 500 000 alternatives keeps build
10434 busy for minutes after its client left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from proxy.common.background_tasks import persist
from proxy.errors import UpstreamTimeout
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.settings import ProxySettings
from proxy.upstream.engine_state import SlotState, get_slots
from proxy.upstream.upstream import Upstream


class SlotContents:
    """The latest list of slots; it is used before the next list is read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._upstream = ""
        self._read_at_s = 0.0
        self._slots: Sequence[SlotState] = ()

    def set(self, upstream: Upstream, slots: Sequence[SlotState]) -> None:
        self._upstream, self._slots, self._read_at_s = upstream.name, slots, self._clock()

    def idle_slot_tokens(self, lease: Lease) -> list[int]:
        """Return the tokens in each idle slot, read after the end of a request."""
        is_later = lease.is_ending and self._read_at_s >= lease.ended_at_s
        if not is_later or self._upstream != lease.upstream.name:
            return []
        return [slot.tokens for slot in self._slots if not slot.is_busy]


_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 2.0

CountBusySlots = Callable[[Upstream], Awaitable[int | None]]
# Frees the slot of a lease; also gets the tokens in the engine's idle slots.
Free = Callable[[Lease, Sequence[int]], None]


class SlotReleaser:
    """Watches the slots of all instances whose requests are over.

    Args:
        count: Asks an instance how many of its slots are in use; None if it does not report that.
        cancel_timeout_s: Above 0.
        overdue: Called once for each slot that is still in use after that time.
        contents: The content of the slots when `count` read them.
    """

    def __init__(
        self,
        count: CountBusySlots,
        clock: Clock,
        cancel_timeout_s: float,
        overdue: Callable[[Lease], None],
        contents: SlotContents | None = None,
    ) -> None:
        self._count = count
        self._clock = clock
        self._cancel_timeout_s = cancel_timeout_s
        self._overdue = overdue
        self._contents = contents
        self._group: asyncio.TaskGroup | None = None
        self._watched: dict[RoutingTarget, asyncio.Event] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()  # as long as the proxy runs
        finally:
            self._group = None
            self._watched.clear()

    def release_when_idle(self, lease: Lease, free: Free) -> None:
        """Free the slot of a request that is over, once the slot is idle.

        At once if `run` is not running, and on another machine, whose own proxy counts its slots.
        """
        if self._group is None or not lease.instance.in_service or lease.upstream.node:
            free(lease, self._idle_slot_tokens(lease))
            return
        lease.end()
        if lease.instance in self._watched:
            self._watched[lease.instance].set()
            return
        self._watched[lease.instance] = asyncio.Event()
        self._group.create_task(self._tend(lease.instance, free))

    def _idle_slot_tokens(self, lease: Lease) -> Sequence[int]:
        return self._contents.idle_slot_tokens(lease) if self._contents else ()

    async def _tend(self, instance: RoutingTarget, free: Free) -> None:
        try:
            await persist("slots", lambda: self._free_when_idle(instance, free))
        finally:
            self._watched.pop(instance, None)

    async def _free_when_idle(self, instance: RoutingTarget, free: Free) -> None:
        pause_s = _FIRST_PAUSE_S
        while instance.ending:
            is_fresh = await self._pause(instance, pause_s)
            pause_s = _FIRST_PAUSE_S if is_fresh else min(2 * pause_s, _LAST_PAUSE_S)
            if not is_fresh:
                self._free_idle(instance, await self._count(instance.upstream), free)

    async def _pause(self, instance: RoutingTarget, pause_s: float) -> bool:
        """Wait; return whether another request ended meanwhile: its slot may be idle soon."""
        another = self._watched[instance]
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await another.wait()
        is_fresh = another.is_set()
        another.clear()
        return is_fresh

    def _free_idle(self, instance: RoutingTarget, busy: int | None, free: Free) -> None:
        ending = instance.ending
        live = sum(not (lease.is_ending or lease.is_paused) for lease in instance.leases)
        still_busy = 0 if busy is None else min(max(0, busy - live), len(ending))
        idle = ending[: len(ending) - still_busy]
        for lease in idle:
            free(lease, self._idle_slot_tokens(lease))
        for lease in ending[len(idle) :]:
            is_late = self._clock() - lease.ended_at_s >= self._cancel_timeout_s
            if is_late and not lease.is_overdue and lease in instance.leases:
                lease.is_overdue = True
                self._overdue(lease)


def slots_in_use(settings: ProxySettings, contents: SlotContents) -> CountBusySlots:
    """Return a function that counts an instance's busy slots, and stores their contents."""

    async def request(upstream: Upstream) -> int | None:
        try:
            slots = await get_slots(upstream, settings)
        except UpstreamTimeout:
            return upstream.slots  # it is there, and busy with something
        if slots is None:
            return None
        contents.set(upstream, slots)
        return sum(slot.is_busy for slot in slots)

    return request
