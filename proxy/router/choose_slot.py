"""Which slot a request uses on an engine whose slots are tracked, and how it gets there.

Why, and how slots are tracked: `proxy.cache.slot_map`. `HandOver` waits until what a draining
instance holds of a conversation is in a file: an instance is saved as soon as it drains, each slot
when its request ends; a client that continues at once would come before the file is verified and
stored, about a tenth of a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum, auto
from typing import Final

from proxy.cache.index import PrefixIndex
from proxy.cache.processes import Run
from proxy.cache.prompt import Prompt
from proxy.cache.slot_map import Search, SlotContent, SlotMap, SlotOwners, TrackedSlot
from proxy.errors import UpstreamTimeout
from proxy.request.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.router.registry import Instances
from proxy.router.slot_saver import SlotFiller
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind, is_single
from proxy.upstream.engine_state import clear_slots, get_slots, refresh_slots
from proxy.upstream.timings import Timings

# A shorter conversation is not saved.
_TOKENS_MIN: Final = 256
# Of the time in which the prompt would be computed.
_SHARE_MAX: Final = 0.5
_WAIT_MAX_S: Final = 1.0


class HandOver:
    """For all instances."""

    def __init__(self, prefix_index: PrefixIndex, instances: Instances) -> None:
        self._prefix_index = prefix_index
        self._instances = instances
        self._added = asyncio.Event()

    def note_file(self) -> None:
        """Note that there is one file more."""
        self._added.set()
        self._added.clear()

    async def wait(self, lease: Lease) -> None:
        """Wait until a file has what another instance held, unless computing it is quicker."""
        prompt, content = lease.request.prompt, self._left_behind(lease)
        if prompt is None or content is None:
            return
        compute_s = content.tokens / lease.instance.rates.prefill_tps
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAIT_MAX_S, _SHARE_MAX * compute_s)):
                while not self._is_saved(lease, prompt, content):
                    await self._added.wait()

    def _left_behind(self, lease: Lease) -> SlotContent | None:
        """Return what a slot of an instance that drains holds of a conversation."""
        if not lease.is_continued:
            return None
        key = lease.upstream.cache_key
        runs = (run for run in self._prefix_index.runs_with_files() if run.cache_key == key)
        contents = (
            run.slot_map.content_of(lease.conversation) for run in filter(self._drains, runs)
        )
        return next(
            (content for content in contents if content and content.tokens >= _TOKENS_MIN), None
        )

    def _drains(self, run: Run) -> bool:
        instance = self._instances.get(run.name)
        return not run.has_ended and (instance is None or not instance.in_service)

    def _is_saved(self, lease: Lease, prompt: Prompt, content: SlotContent) -> bool:
        found = self._prefix_index.files.find(lease.upstream.cache_key, prompt)
        return found is not None and len(found.file.fingerprint.blocks) >= len(content.blocks)


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
    names = request.kind in _NAMES_SLOTS
    # Only where it must: what an engine keeps of its prompt is not tracked as well.
    names = names or (request.kind is EndpointKind.INFILL and request.owner.is_alone)
    is_named = names and bool(request.json) and not request.form
    return SlotTargeting.BY_ID if is_named and is_single(request.json) else SlotTargeting.NONE


class SlotSelector:
    """Selects the slots of all instances."""

    def __init__(
        self,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        filler: SlotFiller,
        hand_over: HandOver,
    ) -> None:
        self._prefix_index = prefix_index
        self._settings = settings
        self._filler = filler
        self._hand_over = hand_over

    async def select(self, lease: Lease) -> None:
        """Give a lease its slot, and `id_slot` where its request is to name it.

        To be called right before the request is sent: the order in which requests arrive decides
        which slots the engine gives them.
        """
        is_tracked = self._settings.policy == "affinity" and lease.upstream.can_name_slots
        slot_map = self._prefix_index.slot_map(lease.upstream.name)
        if not is_tracked or not lease.request.kind.takes_slot:
            await self.enter(lease)
            return
        reach = targeting(lease.request)
        conversation = lease.conversation if reach is not SlotTargeting.NONE else None
        # Noted at once: a client may leave while the slot is made ready.
        lease.slot = slot = slot_map.reserve(lease, conversation, lease.clock())
        async with self._order(lease, slot, reach) as is_alone:
            if slot and conversation is not None:
                lease.slot = slot = await self._target(lease, slot_map, slot, reach)
            if slot:
                _note_slot(lease, slot_map, slot, reach, is_alone=is_alone)
                await self._separate(lease, slot_map, slot, reach)
                if _looks_in_cache(lease) and slot.verifies_restore(lease.request.prompt):
                    lease.restored_tokens = slot.tokens
                await self._keep_paused(lease, slot_map)
                slot_map.mark_sent(slot, _search(lease))
            else:
                await self.enter(lease)
            for slot_lease in lease.beside:
                if tracked := slot_map.reserve(slot_lease, None, lease.clock()):
                    slot_lease.slot = tracked
                    slot_map.mark_sent(tracked, Search())

    async def _separate(
        self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot, reach: SlotTargeting
    ) -> None:
        """Keep a request from what others left in the engine: it names its slot, if it can."""
        owner, owners = lease.request.owner, slot_map.owners
        if not owner.is_alone and not owners.has_alone:
            await self.enter(lease)
            return
        if reach is SlotTargeting.BY_ID and lease.id_slot is None and owners.has_others(owner):
            if not slot.is_confirmed:
                await self._sync(lease, slot_map, slot)
            if slot.is_confirmed:
                lease.id_slot = slot.id_slot
        # What it was filled with, now or as the process began, was found by the owner's hashes.
        is_own = lease.conversation is not None and slot.conversation is lease.conversation
        if lease.restored or (is_own and slot.task is not None and slot.is_confirmed):
            owners.fill(owner, lease.id_slot)
        await self.enter(lease)

    async def enter(self, lease: Lease) -> None:
        """Note whose request is sent, and whether it may reuse what the engine holds.

        Returns once it can be sent without that a key finds what another one left.

        Raises:
            UpstreamFailed, UpstreamTimeout: What others left could not be cleared.
        """
        request, upstream = lease.request, lease.upstream
        if request.is_background or not request.kind.takes_slot:
            return
        if upstream.node:  # another llama-corral is told the owner
            lease.is_cache_off = request.owner.is_alone and not upstream.node.takes_keep_alive
        else:
            owners = self._prefix_index.slot_map(upstream.name).owners
            is_apart = request.owner.is_alone or owners.has_alone
            if upstream.reuses_vectors and is_apart:
                await self._take_turn(lease, owners)
            else:
                self._begin(lease, owners)
            while owners.must_wait(lease):
                await lease.instance.wait_placed()
        if lease.is_cache_off:
            lease.expected_cached = 0

    async def _take_turn(self, lease: Lease, owners: SlotOwners) -> None:
        """Have the engine to the requests of one owner alone, with nothing of others in its slots.

        Those that come later wait behind this one, also those of the owner before.
        """
        owner, instance = lease.request.owner, lease.instance
        async with instance.owner_turn:
            if not owners.has_only(owner):
                while owners.are_in_engine(owner):
                    await instance.wait_placed()
                await clear_slots(lease.upstream, self._settings)
                owners.clear(owner)
            self._begin(lease, owners)

    def _begin(self, lease: Lease, owners: SlotOwners) -> None:
        lease.owners = owners
        lease.is_cache_off = not owners.begin(lease, lease.request.owner, lease.id_slot)

    @asynccontextmanager
    async def _order(
        self, lease: Lease, slot: TrackedSlot | None, reach: SlotTargeting
    ) -> AsyncIterator[bool]:
        """Hold what keeps the engine from taking another slot while one is made ready.

        The block gets whether no other slot is made ready meanwhile.
        """
        if not lease.upstream.cache_key or (slot and _is_ready(slot, reach)):
            yield True
            return
        order, is_named = lease.instance.slot_order, reach is SlotTargeting.BY_ID
        is_filled = is_named and slot and slot.is_confirmed and self._filler.has_file(lease, slot)
        async with order.reader if is_filled else order.writer:
            yield not is_filled

    def note_turn(self, lease: Lease, timings: Timings) -> None:
        """Learn from a complete response in a slot that files are made of."""
        self._filler.saver.note_turn(lease, timings)

    async def _target(
        self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot, reach: SlotTargeting
    ) -> TrackedSlot | None:
        """Return the slot that a conversation is to use; it holds that if it can."""
        found: TrackedSlot | None = slot
        if slot.conversation is not None:
            found = await self._confirm(lease, slot_map, slot)
        else:
            slot_map.note_return(lease.conversation)
        if found is None:
            return None
        if found.conversation is None and lease.upstream.cache_key:
            found = await self._fill(lease, slot_map, found)
        if found.conversation is None:
            return await self._target_new(lease, slot_map, found)
        if reach is SlotTargeting.BY_LRU:
            await refresh_slots(lease.upstream, slot_map.mark_refreshed(found), self._settings)
        return found

    async def _fill(self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot) -> TrackedSlot:
        """Return a slot that was filled from a file, where that pays and its number is known."""
        await self._hand_over.wait(lease)
        if not self._filler.is_wanted(lease, slot):
            return slot
        if not slot.is_confirmed:
            await self._sync(lease, slot_map, slot)
            slot = slot_map.reserve_lru(slot)
        if slot.is_confirmed:
            await self._filler.fill(lease, slot)
        return slot

    async def _confirm(
        self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot
    ) -> TrackedSlot | None:
        """Return the slot that holds a conversation, as the engine lists them, or another one."""
        if not slot.is_confirmed:
            await self._sync(lease, slot_map, slot)
        if slot.is_confirmed:
            return slot
        return slot_map.rebind(slot, lease.conversation, lease.clock())

    async def _target_new(self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot) -> TrackedSlot:
        """Have the engine save what the other idle slots hold, where it looks for shared prefixes.

        Only where a new conversation begins as another did that is not saved yet. Any task makes it
        do so. One of no tokens, in a slot that holds no conversation, saves what all others hold;
        they are used after it and leave that slot to the request.
        """
        if lease.expected_cached < _WORTH_TOKENS or not slot_map.has_unsaved(slot):
            return slot
        await self._sync(lease, slot_map, slot)
        slot = slot_map.reserve_lru(slot)
        if slot.is_confirmed:
            await refresh_slots(lease.upstream, [slot.id_slot], self._settings)
            await refresh_slots(lease.upstream, slot_map.mark_refreshed(slot), self._settings)
            slot.is_aimed = True
        return slot

    async def _sync(self, lease: Lease, slot_map: SlotMap, slot: TrackedSlot) -> None:
        """Find the number of each slot, by the engine's list of them."""
        with suppress(UpstreamTimeout):
            found = await get_slots(lease.upstream, self._settings, _LISTED_TIMEOUT_S) or ()
            slot_map.sync(found, slot, lease.clock())

    async def _keep_paused(self, lease: Lease, slot_map: SlotMap) -> None:
        """Use the slots once more whose prompts pause between two chunks, so that none is taken."""
        paused = [
            paused_lease
            for paused_lease in lease.instance.leases
            if paused_lease.is_paused and paused_lease.slot
        ]
        if lease.id_slot is not None or not paused:
            return
        slots = [
            paused_lease.id_slot for paused_lease in paused if paused_lease.id_slot is not None
        ]
        await refresh_slots(lease.upstream, slots, self._settings)
        for paused_lease in paused:
            if paused_lease.slot:
                slot_map.mark_sent(paused_lease.slot)


def _is_ready(slot: TrackedSlot, reach: SlotTargeting) -> bool:
    """Return whether a request only has to name its slot, which holds its conversation."""
    return reach is SlotTargeting.BY_ID and slot.is_confirmed and slot.conversation is not None


def _names_slot(lease: Lease, slot_map: SlotMap, slot: TrackedSlot, *, is_alone: bool) -> bool:
    """Return whether a request names its slot, in which the engine then looks for its prompt alone.

    Without a name, the engine could take a slot that is being filled for another request, and where
    it keeps the prompt would be a guess. With one, it neither copies what the slot holds to the
    host cache, nor looks for the prompt there.
    """
    if slot.conversation is not None:
        return slot.is_confirmed
    if not lease.upstream.cache_key:
        return False
    if not is_alone:
        return True
    if slot_map.is_lost_if_named(slot):
        return False
    prompt, conversation = lease.request.prompt, lease.conversation
    return not prompt or not slot_map.is_elsewhere(slot, conversation, prompt.blocks)


def _note_slot(
    lease: Lease, slot_map: SlotMap, slot: TrackedSlot, reach: SlotTargeting, *, is_alone: bool
) -> None:
    """Note how a request gets its slot, and whether that holds its conversation."""
    if reach is SlotTargeting.BY_ID and _names_slot(lease, slot_map, slot, is_alone=is_alone):
        lease.id_slot = slot.id_slot
        slot.is_confirmed = True
    lease.has_own_slot = slot.conversation is not None and lease.restored is None
    lease.is_beside_own = slot.conversation is None and slot_map.is_in_use(lease.conversation)


def _search(lease: Lease) -> Search | None:
    """Return what the engine looks for in its host cache, for a request that names no slot."""
    prompt = lease.request.prompt
    if lease.id_slot is not None:
        return None
    return Search(lease.conversation, prompt.blocks if prompt else ())


def _looks_in_cache(lease: Lease) -> bool:
    return not lease.is_cache_off and lease.request.json.get("cache_prompt") is not False
