"""Saves slots to files where that pays, and measures what it takes."""

from __future__ import annotations

from typing import Final

from proxy.prompt_cache.conversations import Conversation
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.slot_map import SlotContent, TrackedSlot
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.router.response_progress import Clock
from proxy.slot_files.decision import SaveCase, pays_to_save
from proxy.slot_files.measures import SlotFileMeasures
from proxy.slot_files.storage import SlotFileStorage, Transfer
from proxy.upstream.timings import Timings

# A stream should not show a longer pause.
PAUSE_MAX_S: Final = 0.25


class SlotSaver:
    """For all instances."""

    def __init__(self, prefix_index: PrefixIndex, storage: SlotFileStorage, clock: Clock) -> None:
        self._prefix_index = prefix_index
        self._storage = storage
        self._clock = clock
        self._measures: dict[str, SlotFileMeasures] = {}

    def measures(self, model: str) -> SlotFileMeasures:
        return self._measures.setdefault(model, SlotFileMeasures())

    def pays(self, instance: Instance, content: SlotContent) -> bool:
        """Return whether to save what a slot holds that a request is about to use."""
        case = self._case(instance, content)
        if case is None or not pays_to_save(case, PAUSE_MAX_S):
            return False
        return self._storage.may_save(instance.upstream.name, _size_bytes(instance, content))

    async def save(
        self, instance: Instance, slot: TrackedSlot, content: SlotContent
    ) -> Transfer | None:
        """Save what a slot of known number holds; None where that failed."""
        upstream, sent = instance.upstream, slot.started
        fingerprint = self._prefix_index.fingerprint(upstream.name, content)
        transfer = await self._storage.save(
            upstream.name, slot.id_slot, content.tokens, fingerprint
        )
        if transfer:
            self.measures(upstream.model).note_save(transfer)
            if slot.started == sent:
                slot.note_saved(content)
        return transfer

    def note_restored(self, instance: Instance, transfer: Transfer) -> None:
        """Learn how long restores take."""
        upstream = instance.upstream
        self.measures(upstream.model).note_restore(transfer)
        byte_s = transfer.duration_s / transfer.size_bytes
        byte_tokens = byte_s * instance.rates.prefill_tps
        self._prefix_index.files.set_restore_cost(upstream.cache_key, byte_tokens)

    def note_turn(self, lease: Lease, timings: Timings) -> None:
        """Learn how often conversations return, and whether their caches are there then."""
        if lease.upstream.cache_key and lease.conversation_number is not None:
            prompt = timings.cached_tokens + timings.prompt_tokens
            found = 0 if lease.restored else timings.cached_tokens
            self.measures(lease.upstream.model).note_turn(
                lease.conversation_number, lease.began_at_s, self._clock(), prompt, found
            )

    def _case(self, instance: Instance, content: SlotContent) -> SaveCase | None:
        """Return what is expected of saving a slot; None where it holds nothing new."""
        upstream, conversation = instance.upstream, content.conversation
        turn_hashes = self._prefix_index.fingerprint(upstream.name, content).turn_hashes
        if content.is_saved or not turn_hashes or not isinstance(conversation, Conversation):
            return None
        saved = self._prefix_index.files.tokens(upstream.cache_key, turn_hashes)
        measures, size_bytes = self.measures(upstream.model), _size_bytes(instance, content)
        return SaveCase(
            tokens=content.tokens - saved,
            prefill_tps=instance.rates.prefill_tps,
            save_s=measures.save_s(size_bytes),
            restore_s=measures.restore_s(size_bytes),
            return_p=measures.return_p(conversation.number, self._clock()),
            loss_p=measures.loss_p,
            streams=instance.work.decoding,
            is_taken_next=True,
        )


def _size_bytes(instance: Instance, content: SlotContent) -> float:
    return content.tokens * instance.upstream.token_bytes + instance.upstream.state_bytes
