"""Saves what idle slots hold to files, before other requests take them.

An engine that has been idle for a moment saves all that pays, the most valuable first, one slot
after the other until a request comes. A busy one saves the slot that it takes next: where no stream
would wait for that, or few slots are free. Nothing is saved twice; what fails is tried again after
the next request.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from proxy.errors import UpstreamTimeout
from proxy.failures import persist
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.slot_map import SlotMap, TrackedSlot
from proxy.router.instances import Instance
from proxy.router.response_progress import Clock
from proxy.router.slot_saving import SlotSaver
from proxy.slot_files.decision import SaveCase, due_in_s
from proxy.upstream.slots import SlotState
from proxy.upstream.upstream import Upstream

# A client that goes on at once does so within this time.
_IDLE_S: Final = 0.25
# An engine that lists its slots each second does not notice that clients have left.
_LISTED_S: Final = 2.0
# A shorter wait may not end later than it began.
_SHORTEST_S: Final = 0.001
# Without an event, what pays is looked at again after this time.
_LOOKS_AGAIN_S: Final = 5.0

ListSlots = Callable[[Upstream], Awaitable[Sequence[SlotState] | None]]
_Worth = Sequence[tuple[TrackedSlot, SaveCase]]


@dataclass(slots=True, eq=False)
class _Work:
    """What is done for one instance.

    Attributes:
        ended: Set when a request of it ends.
        listed_at_s: When its slots were listed last.
        failed: Slots that were not saved, each with when it was freed before.
    """

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ended_at_s: float = 0.0
    listed_at_s: float = -math.inf
    failed: dict[TrackedSlot, int] = field(default_factory=dict)


class SlotWriter:
    """For all instances; does nothing while `run` does not run.

    `list_slots` reads an engine's `/slots`; None where it does not say.
    """

    def __init__(
        self, prefix_index: PrefixIndex, saver: SlotSaver, list_slots: ListSlots, clock: Clock
    ) -> None:
        self._prefix_index = prefix_index
        self._saver = saver
        self._list_slots = list_slots
        self._clock = clock
        self._group: asyncio.TaskGroup | None = None
        self._works: dict[Instance, _Work] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await asyncio.Event().wait()  # without limit: for as long as the proxy runs
        finally:
            self._group = None
            self._works.clear()

    def request_ended(self, instance: Instance) -> None:
        """Note that a request on an instance with slot files has ended."""
        if self._group is None:
            return
        work = self._works.get(instance)
        if work is None:
            work = self._works[instance] = _Work()
            self._group.create_task(self._tend(instance, work))
        work.ended_at_s = self._clock()
        work.ended.set()
        if not instance.leases:
            work.failed.clear()

    async def _tend(self, instance: Instance, work: _Work) -> None:
        try:
            await persist("slot_writer", lambda: self._write(instance, work))
        finally:
            self._works.pop(instance, None)

    async def _write(self, instance: Instance, work: _Work) -> None:
        """Save until the instance is idle and nothing is left that pays."""
        while instance.in_service and (run := self._prefix_index.run(instance.upstream.name)):
            work.ended.clear()
            worth = self._worth_saving(instance, work, run.slot_map)
            if instance.leases:
                wait_s = await self._step_busy(instance, work, run.slot_map, worth)
            elif worth:
                wait_s = await self._step_idle(instance, work, run.slot_map, worth)
            else:
                return
            if wait_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(wait_s, _SHORTEST_S)):
                        await work.ended.wait()

    def _worth_saving(self, instance: Instance, work: _Work, slot_map: SlotMap) -> _Worth:
        """Return the slots to save, in the order in which the engine takes them."""
        new = (one for one in slot_map.unsaved_idle if work.failed.get(one) != one.freed)
        cases = ((one, self._saver.case(instance, one.content)) for one in new)
        return [(one, case) for one, case in cases if case and self._saver.is_worth(case)]

    async def _step_idle(
        self, instance: Instance, work: _Work, slot_map: SlotMap, worth: _Worth
    ) -> float:
        """Save one slot at most; return after how long to look again."""
        idle_s = self._clock() - work.ended_at_s
        if idle_s < _IDLE_S:
            return _IDLE_S - idle_s
        slot, _ = max(worth, key=lambda one: one[1].saving_s)
        is_listed = work.listed_at_s > work.ended_at_s
        await self._save(instance, work, slot_map, slot, is_listed=is_listed)
        return 0.0

    async def _step_busy(
        self, instance: Instance, work: _Work, slot_map: SlotMap, worth: _Worth
    ) -> float:
        """As `_step_idle`, of the slot that the engine takes next."""
        if not worth:
            return _LOOKS_AGAIN_S
        slot, case = worth[0]
        if case.streams and instance.free > max(1, instance.upstream.slots // 2):
            return _LOOKS_AGAIN_S
        listed_s = self._clock() - work.listed_at_s
        is_listed = slot.is_confirmed and listed_s < _LISTED_S
        wait_s = max(due_in_s(case), 0.0 if is_listed else _LISTED_S - listed_s)
        if wait_s > 0:
            return min(wait_s, _LOOKS_AGAIN_S)
        await self._save(instance, work, slot_map, slot, is_listed=is_listed)
        return _LISTED_S

    async def _save(
        self,
        instance: Instance,
        work: _Work,
        slot_map: SlotMap,
        slot: TrackedSlot,
        *,
        is_listed: bool,
    ) -> None:
        """Save an idle slot, if it is still the same once the engine has listed its slots."""
        uses = slot_map.uses
        if not is_listed:
            await self._list(instance, work, slot_map)
        if slot_map.uses != uses:
            return
        is_known = slot.is_confirmed and slot.conversation is not None
        if not (is_known and await self._saver.save(instance, slot, slot.content)):
            work.failed[slot] = slot.freed

    async def _list(self, instance: Instance, work: _Work, slot_map: SlotMap) -> None:
        """Find the slots' numbers.

        Not while a request gets a slot: the engine's order would be another than ours.
        """
        work.listed_at_s, uses = self._clock(), slot_map.uses
        if slot_map.is_pending or not all(one.progress.has_header for one in instance.leases):
            return
        with suppress(UpstreamTimeout):
            listed = await self._list_slots(instance.upstream)
            if listed and slot_map.uses == uses:
                slot_map.sync(listed, None, self._clock())
