"""Which slot a request uses on an engine whose slots are tracked, and how it gets there.

Why, and how slots are tracked: `proxy.prompt_cache.slot_map`.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum, auto
from typing import Final

from proxy.endpoints import EndpointKind, is_single
from proxy.errors import UpstreamTimeout
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.slot_map import SlotMap, TrackedSlot
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.settings import ProxySettings
from proxy.upstream.slots import get_slots, refresh_slots

# Fewer tokens than this are computed as quickly as they are saved.
_WORTH_TOKENS: Final = 128
# The engine begins no request before the batch is over that its list of slots waits for, so this
# wait costs a request nothing; without the list its prompt may be computed again.
_LISTED_TIMEOUT_S: Final = 20.0
_NAMES_SLOTS: Final = frozenset(
    {
        EndpointKind.CHAT,
        EndpointKind.COMPLETION,
        EndpointKind.RESPONSES,
        EndpointKind.LLAMA_COMPLETION,
    }
)


class SlotTargeting(Enum):
    """How a request can get a certain slot."""

    NONE = auto()
    BY_ID = auto()
    """It names the slot."""
    BY_LRU = auto()
    """All other idle slots are used once more: the engine takes the one used longest ago."""


def targeting(request: ProxyRequest) -> SlotTargeting:
    if request.kind is EndpointKind.MESSAGES:  # its translation drops members it does not know
        return SlotTargeting.BY_LRU
    is_named = request.kind in _NAMES_SLOTS and bool(request.json) and not request.form
    return SlotTargeting.BY_ID if is_named and is_single(request.json) else SlotTargeting.NONE


async def select_slots(lease: Lease, prefix_index: PrefixIndex, settings: ProxySettings) -> None:
    """Give a lease its slot, and `id_slot` where its request is to name it.

    To be called right before the request is sent: the order in which requests arrive decides which
    slots the engine gives them.
    """
    is_tracked = settings.policy == "affinity" and lease.upstream.can_name_slots
    if not is_tracked or not lease.request.kind.takes_slot:
        return
    slot_map = prefix_index.slot_map(lease.upstream.name)
    reach, now_s = targeting(lease.request), lease.clock()
    conversation = lease.conversation if reach is not SlotTargeting.NONE else None
    slot = slot_map.reserve(lease, conversation, now_s)
    if slot and slot.conversation is not None:
        slot = await _target_existing(lease, slot_map, slot, reach, settings)
    elif slot and conversation is not None and _shares_prefix(lease, slot_map, slot):
        slot = await _target_new(lease, slot_map, slot, settings)
    lease.slot = slot
    if slot:
        lease.has_own_slot = slot.conversation is not None
        lease.is_beside_own = not lease.has_own_slot and slot_map.is_in_use(conversation)
        if reach is SlotTargeting.BY_ID and slot.is_confirmed and slot.conversation is not None:
            lease.id_slot = slot.id_slot
            lease.verifies_restore = _looks_in_cache(lease.request) and slot.verifies_restore(
                lease.request.prompt
            )
        await _keep_paused(lease, slot_map, settings)
        slot_map.mark_sent(slot)
    for one in lease.beside:
        if tracked := slot_map.reserve(one, None, lease.clock()):
            one.slot = tracked
            slot_map.mark_sent(tracked)


async def _keep_paused(lease: Lease, slot_map: SlotMap, settings: ProxySettings) -> None:
    """Use the slots once more whose prompts pause between two chunks, so that none is taken."""
    paused = [one for one in lease.instance.leases if one.is_paused and one.slot]
    if lease.id_slot is not None or not paused:
        return
    slots = [one.id_slot for one in paused if one.id_slot is not None]
    await refresh_slots(lease.upstream, slots, settings)
    for one in paused:
        if one.slot:
            slot_map.mark_sent(one.slot)


async def _target_existing(
    lease: Lease,
    slot_map: SlotMap,
    slot: TrackedSlot,
    reach: SlotTargeting,
    settings: ProxySettings,
) -> TrackedSlot | None:
    if not slot.is_confirmed:
        await _sync(lease, slot_map, slot, settings)
    if not slot.is_confirmed:
        return slot_map.rebind(slot, lease.conversation, lease.clock())
    if reach is SlotTargeting.BY_LRU:
        await refresh_slots(lease.upstream, slot_map.mark_refreshed(slot), settings)
    return slot


def _shares_prefix(lease: Lease, slot_map: SlotMap, slot: TrackedSlot) -> bool:
    """Whether a new conversation begins as another did that is not saved yet."""
    return lease.expected_cached >= _WORTH_TOKENS and slot_map.has_unsaved(slot)


async def _target_new(
    lease: Lease, slot_map: SlotMap, slot: TrackedSlot, settings: ProxySettings
) -> TrackedSlot:
    """Have the engine save what the other idle slots hold, where it looks for shared prefixes.

    Any task makes it do so. One of no tokens, in a slot that holds no conversation, saves what all
    others hold; they are used after it and leave that slot to the request.
    """
    await _sync(lease, slot_map, slot, settings)
    slot = slot_map.reserve_lru(slot)
    if slot.is_confirmed:
        await refresh_slots(lease.upstream, [slot.id_slot], settings)
        await refresh_slots(lease.upstream, slot_map.mark_refreshed(slot), settings)
    return slot


async def _sync(
    lease: Lease, slot_map: SlotMap, slot: TrackedSlot, settings: ProxySettings
) -> None:
    with suppress(UpstreamTimeout):
        found = await get_slots(lease.upstream, settings, _LISTED_TIMEOUT_S) or ()
        slot_map.sync(found, slot, lease.clock())


def _looks_in_cache(request: ProxyRequest) -> bool:
    return request.json.get("cache_prompt") is not False
