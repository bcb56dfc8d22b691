"""How a request comes to the slot that it should use, on an engine whose slots are followed.

Why it is done, and how slots are followed, stands in `proxy.prompt_cache.slot_map`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from proxy.errors import UpstreamTimeout
from proxy.prompt_cache.slot_map import SlotMap, TrackedSlot
from proxy.request import ProxyRequest
from proxy.router.lease import Clock, Lease
from proxy.settings import ProxySettings
from proxy.upstream.slots import SlotTargeting, get_slots, refresh_slots

# Fewer tokens than this are computed as quickly as they are put aside.
_WORTH_TOKENS: Final = 128


class SlotSelection:
    """One request on its way to a slot; made for a lease, used once.

    Args:
        lease: Its lease.
        slot_map: The slots of its instance.
        settings: How long the engine may take to tell of its slots.
        clock: Monotonic time.
    """

    def __init__(
        self, lease: Lease, slot_map: SlotMap, settings: ProxySettings, clock: Clock
    ) -> None:
        self._lease = lease
        self._slot_map = slot_map
        self._settings = settings
        self._clock = clock

    async def select(self, reach: SlotTargeting) -> int | None:
        """Give the lease its slot; return the `id_slot` that its request should name, if any.

        To be done right before the request goes out: the order in which requests come decides
        which slots the engine gives them.

        Args:
            reach: How the request could come to a certain slot.
        """
        lease, conversation = (
            self._lease,
            self._lease.conversation if reach is not SlotTargeting.NONE else None,
        )
        slot = self._slot_map.reserve(lease, conversation, self._clock())
        if slot and slot.conversation is not None:
            slot = await self._target_existing(slot, reach)
        elif slot and conversation is not None and self._shares_prefix(slot):
            slot = await self._target_new(slot)
        lease.slot = slot
        if slot is None:
            return None
        is_named = (
            slot.is_confirmed and slot.conversation is not None and reach is SlotTargeting.BY_ID
        )
        lease.verifies_restore = (
            is_named
            and _looks_in_cache(lease.request)
            and slot.verifies_restore(lease.request.prompt)
        )
        self._slot_map.mark_sent(slot)
        return slot.id_slot if is_named else None

    async def _target_existing(self, slot: TrackedSlot, reach: SlotTargeting) -> TrackedSlot | None:
        """Come back to the slot that holds the conversation, if it does."""
        if not slot.is_confirmed:
            await self._sync(slot)
        if not slot.is_confirmed:
            return self._slot_map.rebind(slot, self._lease.conversation, self._clock())
        if reach is SlotTargeting.BY_LRU:
            await self._refresh(self._slot_map.mark_refreshed(slot))
        return slot

    def _shares_prefix(self, slot: TrackedSlot) -> bool:
        """Return whether a new conversation begins as another did that is not put aside yet."""
        return self._lease.expected_cached >= _WORTH_TOKENS and self._slot_map.has_unsaved(slot)

    async def _target_new(self, slot: TrackedSlot) -> TrackedSlot:
        """Have what the other idle slots hold put aside, where the engine looks for beginnings.

        Any task makes it do so. One of no tokens in a slot that nobody comes back for puts aside
        what all others hold; used after it, they leave that slot to the request.
        """
        await self._sync(slot)
        slot = self._slot_map.reserve_lru(slot)
        if slot.is_confirmed:
            await self._refresh([slot.id_slot])
            await self._refresh(self._slot_map.mark_refreshed(slot))
        return slot

    async def _sync(self, slot: TrackedSlot) -> None:
        with suppress(UpstreamTimeout):
            page = await get_slots(self._lease.upstream, self._settings) or ()
            self._slot_map.sync(page, slot, self._clock())

    async def _refresh(self, slots: list[int]) -> None:
        await refresh_slots(self._lease.upstream, slots, self._settings)


def _looks_in_cache(request: ProxyRequest) -> bool:
    return request.json.get("cache_prompt") is not False
