"""Saves slots to files where that pays, and measures what it takes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from proxy.prompt_cache.conversations import Conversation
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.no_file import NoFile
from proxy.prompt_cache.slot_map import SlotContent, TrackedSlot
from proxy.router.instances import Instance
from proxy.router.lease import Lease
from proxy.router.response_progress import Clock
from proxy.settings import ProxySettings
from proxy.slot_files.decision import SaveCase, is_worth_saving, pays_to_save
from proxy.slot_files.measures import SlotFileMeasures
from proxy.slot_files.storage import SlotFileStorage, Transfer
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


class SlotSaver:
    """For all instances.

    Attributes:
        skipped: How many conversations were not saved, by model and reason.
    """

    def __init__(
        self,
        prefix_index: PrefixIndex,
        settings: ProxySettings,
        storage: SlotFileStorage,
        clock: Clock,
    ) -> None:
        self._prefix_index = prefix_index
        self._pause_max_s = settings.slot_save_pause_max_ms / 1000
        self._storage = storage
        self._clock = clock
        self._measures: defaultdict[str, SlotFileMeasures] = defaultdict(SlotFileMeasures)
        self._saved_at_s: dict[str, float] = {}
        self.skipped: Counter[tuple[str, NoFile]] = Counter()

    def measures(self, model: str) -> SlotFileMeasures:
        return self._measures[model]

    def pays(self, instance: Instance, content: SlotContent) -> bool:
        """Return whether to save what a slot holds that a request is about to use."""
        case = self.case(instance, content, is_taken_next=True)
        if case is None:
            return False
        is_worth = pays_to_save(case, self._pause_max_s)
        if not is_worth:
            self._skip(instance, content, NoFile.COST)
        return is_worth

    def is_worth(self, case: SaveCase) -> bool:
        """Return whether to save a slot, now or once its engine's streams may be paused."""
        return is_worth_saving(case, self._pause_max_s)

    async def save(
        self, instance: Instance, slot: TrackedSlot, content: SlotContent
    ) -> Transfer | None:
        """Save what a slot of known number holds; None where that failed."""
        upstream, sent = instance.upstream, slot.started
        self._saved_at_s[upstream.name] = self._clock()
        fingerprint = self._prefix_index.fingerprint(upstream.name, content)
        transfer = await self._storage.save(
            upstream.name, slot.id_slot, content.tokens, fingerprint
        )
        if transfer:
            self.measures(upstream.model).note_save(transfer)
            if isinstance(content.conversation, Conversation):
                content.conversation.no_file = None
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
        """Learn how often conversations return, and what of their caches and files is used then."""
        if lease.upstream.cache_key and lease.conversation_number is not None:
            prompt = timings.cached_tokens + timings.prompt_tokens
            found = 0 if lease.restored else timings.cached_tokens
            measures = self.measures(lease.upstream.model)
            measures.note_turn(
                lease.conversation_number, lease.began_at_s, self._clock(), prompt, found
            )
            if lease.restored:
                measures.note_use(min(lease.restored_tokens, prompt), timings.cached_tokens)

    def _skip(self, instance: Instance, content: SlotContent, reason: NoFile) -> None:
        """Note why a conversation is not saved; counted once until that changes."""
        conversation = content.conversation
        if isinstance(conversation, Conversation) and conversation.no_file is not reason:
            conversation.no_file = reason
            self.skipped[instance.upstream.model, reason] += 1

    def _absence_p(self, upstream: Upstream, content: SlotContent) -> float:
        """Return the chance that the host cache does not hold what leaves its slot; 0: unknown."""
        run = self._prefix_index.run(upstream.name)
        if run is None or run.host_cache is None:
            return 0.0
        return run.host_cache.absence_probability(content.tokens)

    def case(
        self, instance: Instance, content: SlotContent, *, is_taken_next: bool = False
    ) -> SaveCase | None:
        """Return what is expected of saving a slot; None where nothing can be saved of it."""
        upstream, conversation = instance.upstream, content.conversation
        turn_hashes = self._prefix_index.fingerprint(upstream.name, content).turn_hashes
        if content.is_saved or not turn_hashes or not isinstance(conversation, Conversation):
            return None
        size_bytes = content.tokens * upstream.token_bytes + upstream.state_bytes
        if not self._storage.may_save(upstream.name, size_bytes):
            self._skip(instance, content, NoFile.LIMIT)
            return None
        measures, rates, now_s = self.measures(upstream.model), instance.rates, self._clock()
        saved_at_s = self._saved_at_s.get(upstream.name, -math.inf)
        return SaveCase(
            tokens=content.tokens
            - self._prefix_index.files.tokens(upstream.cache_key, turn_hashes),
            prefill_tps=rates.prefill_tps,
            save_s=measures.save_s(size_bytes),
            restore_s=measures.restore_s(size_bytes),
            return_p=measures.return_p(conversation.number, now_s) * measures.use,
            loss_p=max(measures.loss_p, self._absence_p(upstream, content) * is_taken_next),
            streams=instance.work.decoding,
            gap_s=1 / rates.decode_tps,
            decoded=(now_s - saved_at_s) * rates.decode_tps,
            is_taken_next=is_taken_next,
        )
