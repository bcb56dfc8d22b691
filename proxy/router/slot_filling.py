"""Fills the slot that a request takes over from a file, and saves what the slot held before.

Both run on the engine between two batches. The request would wait for the end of a batch as well.
"""

from __future__ import annotations

from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.prompt import BLOCK_TOKENS
from proxy.prompt_cache.slot_file_index import SavedPrompt
from proxy.prompt_cache.slot_map import TrackedSlot
from proxy.router.lease import Lease
from proxy.router.slot_saving import SlotSaver
from proxy.slot_files.decision import pays_to_restore
from proxy.slot_files.storage import SlotFileStorage


class SlotFiller:
    """For all instances.

    Attributes:
        saver: Saves what a slot held.
    """

    def __init__(
        self,
        prefix_index: PrefixIndex,
        storage: SlotFileStorage,
        saver: SlotSaver,
    ) -> None:
        self._prefix_index = prefix_index
        self._storage = storage
        self.saver = saver

    def is_wanted(self, lease: Lease, slot: TrackedSlot) -> bool:
        """Return whether a slot that a lease is to use needs to be saved or filled."""
        return self._to_restore(lease, slot) is not None or self._pays(lease, slot)

    def has_file(self, lease: Lease, slot: TrackedSlot) -> bool:
        """Return whether a slot that a lease is to use would be filled from a file."""
        return self._to_restore(lease, slot) is not None

    async def fill(self, lease: Lease, slot: TrackedSlot) -> None:
        """Save what a slot of known number held, and fill it from the file that has most of it."""
        if slot.before and self._pays(lease, slot):
            await self.saver.save(lease.instance, slot, slot.before)
        if saved := self._to_restore(lease, slot):
            await self._restore(lease, slot, saved)

    def _to_restore(self, lease: Lease, slot: TrackedSlot) -> SavedPrompt | None:
        """Return the file that has more of a prompt than slot and host cache, if that pays."""
        prompt, name = lease.request.prompt, lease.upstream.name
        if prompt is None or lease.request.json.get("cache_prompt") is False:
            return None
        if saved := self._prefix_index.files.find(lease.upstream.cache_key, prompt):
            slot_map = self._prefix_index.slot_map(name)
            found = slot_map.found_blocks(slot, lease.conversation, prompt.blocks)
            here = slot_map.held_blocks(slot, prompt.blocks)
            # What the host cache holds is a belief; so a file that has as much and is read quickly
            # comes first.
            cached = here if saved.blocks >= found and saved.is_quick else found
            more = (saved.blocks - cached) * BLOCK_TOKENS
            use = self.saver.measures(lease.upstream.model).use
            if pays_to_restore(round(use * more), saved.cost_tokens):
                return saved
        return None

    def _pays(self, lease: Lease, slot: TrackedSlot) -> bool:
        return slot.before is not None and self.saver.pays(lease.instance, slot.before)

    async def _restore(self, lease: Lease, slot: TrackedSlot, saved: SavedPrompt) -> None:
        slot.empty_before()
        name, upstream = saved.file.name, lease.upstream
        began_at_s = lease.clock()
        transfer = await self._storage.restore(upstream.name, slot.id_slot, name)
        lease.restore_s = lease.clock() - began_at_s
        if transfer is None:
            return
        self.saver.note_restored(lease.instance, transfer)
        slot.fill(lease.conversation, transfer.tokens, saved.file.fingerprint.blocks)
        lease.expected_cached = saved.tokens
        lease.restored = saved
        lease.restored_tokens = transfer.tokens if saved.is_own else saved.tokens
