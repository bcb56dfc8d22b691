"""Saves slots to files if that pays, and fills slots from files.

An engine that has been idle for 0.25 s saves its slots, the most valuable first, until a request
comes. Before a save that takes seconds it is idle for longer. A busy engine saves the slot that it
will take next, if no stream would wait for that, or if few slots are free. Nothing is saved twice;
a failed save is retried after the next request.

If a request takes over a slot, the old content is saved, and the slot is filled from a file. If the
save does not pay, or would pause streams for too long, the engine copies the old content to its
host cache first. It does all of this between two batches, so the request waits no longer than for
the ends of two batches.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from attrs import define

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.holders import Conversation, SavedPrompt
from proxy.cache.host_cache import SlotContent
from proxy.cache.index import PrefixIndex
from proxy.cache.prompt import BLOCK_TOKENS, continues, shared_blocks
from proxy.cache.save_policy import (
    SaveCase,
    SlotFileStorage,
    Transfer,
    due_in_s,
    idle_before_save_s,
    is_worth_copying,
    is_worth_saving,
    pays_to_restore,
)
from proxy.cache.slot_map import Slot, SlotMap
from proxy.errors import UpstreamTimeout
from proxy.observe.cache_finding import NoFile
from proxy.router.engine_faults import ListSlots
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.router.registry import InstanceTasks
from proxy.settings import ProxySettings
from proxy.upstream.engine_state import copy_slots
from proxy.upstream.upstream import Timings

# An engine that lists its slots each second does not notice that clients left.
_LISTED_S: Final = 2.0
# A shorter wait may not end later than it began.
_SHORTEST_S: Final = 0.001
# A request waits no longer than this until the engine has written its prompt's beginning.
_BEGINNING_SAVE_MAX_S: Final = 5.0
# A beginning of whose file an engine finds less than this is computed and saved again.
_OUTDATED_SHARE: Final = 0.5
# Without an event, slots are looked at again after this time.
_LOOKS_AGAIN_S: Final = 5.0

_Worth = Sequence[tuple[Slot, SaveCase]]


@dataclass(slots=True, eq=False)
class _Work:
    """The state of saving one instance's slots."""

    instance: RoutingTarget
    slot_map: SlotMap
    ended_at_s: float = 0.0  # When a request of the instance ended last.
    listed_at_s: float = -math.inf  # When its slots were listed last.
    # Slots whose save failed, each with its `freed` count at that time.
    failed: dict[Slot, int] = field(default_factory=dict)


@define(eq=False, slots=False)
class SlotSaver:
    """Fills slots of all instances, and saves those that are idle while `tasks` run."""

    _prefix_index: PrefixIndex
    _settings: ProxySettings
    _storage: SlotFileStorage
    _clock: Clock
    _list_slots: ListSlots
    _tasks: InstanceTasks

    def __attrs_post_init__(self) -> None:
        self._pause_max_s = self._settings.slot_save_pause_max_ms / 1000
        self._works: dict[RoutingTarget, _Work] = {}
        self._measures = self._prefix_index.measures
        # An idle engine saves these only once their next turn is computed, or is not to be.
        self.postponed: OrderedDict[Conversation, RoutingTarget] = OrderedDict()
        self._saved_at_s: dict[str, float] = {}
        # Slots that are being saved, each with the event at which that ends.
        self._saving: dict[Slot, asyncio.Event] = {}
        # The number of conversations that were not saved, by model and reason.
        self.skipped: Counter[tuple[str, NoFile]] = Counter()

    async def save(
        self, instance: RoutingTarget, slot: Slot, content: SlotContent
    ) -> Transfer | None:
        """Save a slot of known number; None: it failed."""
        upstream, sent = instance.upstream, slot.started_tick
        self._saved_at_s[upstream.name] = self._clock()
        fingerprint = self._prefix_index.fingerprint(upstream.name, content)
        ended = self._saving[slot] = asyncio.Event()
        try:
            transfer = await self._storage.save(
                upstream.name, slot.id_slot, content.tokens, fingerprint
            )
        finally:
            del self._saving[slot]
            ended.set()
        if transfer:
            self._measures[upstream.model].saves.note(transfer)
            if content.conversation:
                content.conversation.no_file = None
                content.conversation.paused_save_s += transfer.duration_s
            if slot.started_tick == sent:
                slot.note_saved(content)
        return transfer

    async def save_beginning(self, lease: Lease, tokens: int) -> bool:
        """Save a lease's slot, which holds the first `tokens` of its prompt, for other instances.

        Returns whether the engine wrote the file, which is stored afterwards.
        """
        prompt, upstream, id_slot = lease.request.prompt, lease.upstream, lease.id_slot
        size_bytes = tokens * upstream.token_bytes + upstream.state_bytes
        if prompt is None or id_slot is None or tokens <= upstream.window_tokens:
            return False
        if not self._storage.may_save(upstream.name, size_bytes):
            return False
        blocks = prompt.blocks[: lease.beginning_blocks]
        fingerprint = ConversationFingerprint((), blocks, beginning=lease.beginning)
        transfer: Transfer | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(_BEGINNING_SAVE_MAX_S):
                transfer = await self._storage.save(upstream.name, id_slot, tokens, fingerprint)
        if transfer:
            self._measures[upstream.model].saves.note(transfer)
        return transfer is not None

    async def save_for_others(self, instance: RoutingTarget, slot: Slot) -> None:
        """Save an idle slot now, because another instance needs its content."""
        slot_map = self._prefix_index.slot_maps[instance.upstream.name]
        work = self._works.get(instance) or _Work(instance, slot_map)
        await self._save_idle(work, slot, is_listed=slot.is_confirmed)

    def _note_restored(self, instance: RoutingTarget, transfer: Transfer) -> None:
        upstream = instance.upstream
        self._measures[upstream.model].restores.note(transfer)
        byte_s = transfer.duration_s / transfer.size_bytes
        self._prefix_index.files.set_restore_cost(upstream.cache_key, byte_s)

    def note_turn(self, lease: Lease, timings: Timings) -> str | None:
        """Learn how often conversations return, and how much of caches and files they use.

        Returns the file of a beginning to which the template has given another text since, such as
        another date.
        """
        if lease.upstream.cache_key and lease.conversation_number is not None:
            prefill_tps = lease.instance.rates.prefill_tps
            self._prefix_index.files.set_prefill_rate(lease.upstream.cache_key, prefill_tps)
            prompt = timings.cached_tokens + timings.prompt_tokens
            found = 0 if lease.restored else timings.cached_tokens
            measures = self._measures[lease.upstream.model]
            measures.note_turn(
                lease.conversation_number, lease.began_at_s, self._clock(), prompt, found
            )
            if lease.restored:
                measures.note_use(min(lease.restored_tokens, prompt), timings.cached_tokens)
                file, found_share = (
                    lease.restored.file,
                    timings.cached_tokens / lease.restored_tokens,
                )
                if not file.fingerprint.turn_hashes and found_share < _OUTDATED_SHARE:
                    self._prefix_index.files.remove([file.name])
                    return file.name
        return None

    def _skip(self, instance: RoutingTarget, content: SlotContent, reason: NoFile) -> None:
        """Set why a conversation is not saved; a reason counts once until it changes."""
        conversation = content.conversation
        if conversation and conversation.no_file is not reason:
            conversation.no_file = reason
            self.skipped[instance.upstream.model, reason] += 1

    def case(
        self,
        instance: RoutingTarget,
        content: SlotContent,
        least_loss_p: float = 0.0,
        waiting: int = 0,
    ) -> SaveCase | None:
        """Return the expected cost and benefit of saving a slot; None: it cannot be saved.

        `least_loss_p`: the content is lost with at least this probability. `waiting`: so many
        requests are not sent yet, one of which waits for the save.
        """
        upstream, conversation = instance.upstream, content.conversation
        turn_hashes = self._prefix_index.fingerprint(upstream.name, content).turn_hashes
        is_short = content.tokens <= upstream.window_tokens
        if content.is_saved or is_short or not turn_hashes or conversation is None:
            return None
        size_bytes = content.tokens * upstream.token_bytes + upstream.state_bytes
        if not self._storage.may_save(upstream.name, size_bytes):
            self._skip(instance, content, NoFile.LIMIT)
            return None
        measures, rates, now_s = self._measures[upstream.model], instance.rates, self._clock()
        saved_at_s = self._saved_at_s.get(upstream.name, -math.inf)
        loss_p = max(measures.loss_p, least_loss_p)
        return_p = measures.returns.return_p(conversation.number, now_s)
        if conversation.is_paused:  # its request waits to go on
            return_p = loss_p = 1.0
            slot_map = self._prefix_index.slot_maps.get(upstream.name)
            if slot_map and slot_map.host_cache:
                loss_p = slot_map.host_cache.absence_probability(content.tokens)
        return SaveCase(
            tokens=content.tokens
            - self._prefix_index.files.tokens(upstream.cache_key, turn_hashes),
            prefill_tps=rates.prefill_tps,
            save_s=measures.saves.duration_s(size_bytes),
            restore_s=measures.restores.duration_s(size_bytes),
            return_p=return_p * measures.use,
            loss_p=loss_p,
            streams=instance.decoding,
            gap_s=1 / rates.decode_tps,
            waiting=waiting,
            decoded=(now_s - saved_at_s) * rates.decode_tps,
            usual_return_s=measures.returns.return_s,
        )

    # Filling a slot.

    async def look(self, instance: str) -> None:
        await self._storage.look(instance)

    def is_wanted(self, lease: Lease, slot: Slot) -> bool:
        return self.has_file(lease, slot) or self._pays(lease, slot)

    def has_file(self, lease: Lease, slot: Slot) -> bool:
        return self._to_restore(lease, slot) is not None

    async def fill(self, lease: Lease, slot: Slot) -> None:
        """Save or copy the old content of a slot of known number; fill it from the best file."""
        if slot.previous and (saving := self._saving.get(slot)):  # since before it was taken
            await saving.wait()
        if slot.previous and self._pays(lease, slot):
            await self.save(lease.instance, slot, slot.previous)
        if saved := self._to_restore(lease, slot):
            await self._copy(lease, slot)
            await self._restore(lease, slot, saved)

    def _to_restore(self, lease: Lease, slot: Slot) -> SavedPrompt | None:
        """Return a file with more of the prompt than slot and host cache, if restoring it pays."""
        prompt, name = lease.request.prompt, lease.upstream.name
        if prompt is None or lease.request.json.get("cache_prompt") is False:
            return None
        if saved := self._prefix_index.files.find(lease.upstream.cache_key, prompt):
            slot_map = self._prefix_index.slot_maps[name]
            held = slot_map.find_held(slot, lease.conversation, prompt.blocks).blocks
            found = shared_blocks(held, prompt.blocks)
            here = shared_blocks(slot.in_engine.blocks, prompt.blocks)
            if lease.upstream.is_all_or_nothing:
                found *= continues(prompt.blocks, held)
                here *= continues(prompt.blocks, slot.in_engine.blocks)
            # The content of the host cache is only estimated, so a file with as much that is read
            # quickly comes first.
            cached = here if saved.blocks >= found and saved.is_quick else found
            more = (saved.blocks - cached) * BLOCK_TOKENS
            use = self._measures[lease.upstream.model].use
            if pays_to_restore(round(use * more), saved.cost_tokens):
                return saved
        return None

    def _pays(self, lease: Lease, slot: Slot) -> bool:
        """Return whether to save the content of a slot that a request is about to replace."""
        if (content := slot.previous) is None:
            return False
        slot_map, loss_p = self._prefix_index.slot_maps[lease.upstream.name], 0.0
        if slot_map.host_cache:  # it may not be copied
            loss_p = slot_map.host_cache.absence_probability(content.tokens)
        if self.has_file(lease, slot) and slot_map.is_lost_if_named(slot):
            loss_p = 1.0  # the file overwrites it before the engine copies it
        case = self.case(lease.instance, content, loss_p, waiting=slot_map.pending)
        is_worth = case is not None and is_worth_saving(case, self._pause_max_s)
        if case and not is_worth:
            self._skip(lease.instance, content, NoFile.COST)
        return is_worth

    async def _copy(self, lease: Lease, slot: Slot) -> None:
        """Have the engine copy content to its host cache that was not saved, if that pays."""
        upstream, content = lease.upstream, slot.previous
        slot_map = self._prefix_index.slot_maps[upstream.name]
        if content is None or content.conversation is None or not slot_map.is_lost_if_named(slot):
            return
        if slot_map.owners.has_others(lease.request.owner):  # they do not use the host cache
            return
        turn_hashes = self._prefix_index.fingerprint(upstream.name, content).turn_hashes
        saved_tokens = self._prefix_index.files.tokens(upstream.cache_key, turn_hashes)
        returns = self._measures[upstream.model].returns
        return_p = returns.return_p(content.conversation.number, self._clock())
        if is_worth_copying(content.tokens - saved_tokens, return_p):
            number = await copy_slots(upstream, self._settings)
            if number is not None:
                slot_map.mark_copied(number)

    async def _restore(self, lease: Lease, slot: Slot, saved: SavedPrompt) -> None:
        slot.drop_previous()
        name, upstream = saved.file.name, lease.upstream
        began_at_s = lease.clock()
        transfer = await self._storage.restore(upstream.name, slot.id_slot, name)
        lease.restore_s = lease.clock() - began_at_s
        if transfer is None:
            return
        self._note_restored(lease.instance, transfer)
        slot.fill(lease.conversation, transfer.tokens, saved.file.fingerprint.blocks)
        if lease.conversation and (prompt := lease.request.prompt):
            self._prefix_index.note_restored(lease.conversation, prompt, saved.file.fingerprint)
        lease.expected_cached = saved.tokens
        lease.restored = saved
        lease.restored_tokens = transfer.tokens if saved.is_whole else saved.tokens

    # Saving idle slots.

    def note_end(self, instance: RoutingTarget) -> None:
        if not self._tasks.are_running:
            return
        work = self._works.get(instance)
        if work is None:
            slot_map = self._prefix_index.slot_maps[instance.upstream.name]
            work = self._works[instance] = _Work(instance, slot_map)
        work.ended_at_s = self._clock()
        if not instance.leases:
            work.failed.clear()
        self._tasks.wake("slot_writer", instance, self._write)

    async def _write(self, instance: RoutingTarget, ended: asyncio.Event) -> None:
        """Save slots until the instance is idle and no further save pays."""
        work, slot_maps = self._works[instance], self._prefix_index.slot_maps
        while instance.in_service and (slot_map := slot_maps.get(instance.upstream.name)):
            ended.clear()
            work.slot_map = slot_map
            worth = self._worth_saving(work)
            if instance.leases:
                wait_s = await self._step_busy(work, worth)
            elif worth:
                wait_s = await self._step_idle(work, worth)
            else:
                break
            if wait_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(wait_s, _SHORTEST_S)):
                        await ended.wait()
        del self._works[instance]

    def _worth_saving(self, work: _Work) -> _Worth:
        """Return the slots to save, in the order in which the engine takes them."""
        later = () if work.instance.leases else self.postponed
        found = work.slot_map.idle
        idle = (slot for slot in found if slot.conversation and slot.conversation not in later)
        new = (slot for slot in idle if work.failed.get(slot) != slot.freed_tick)
        cases = ((slot, self.case(work.instance, slot.content)) for slot in new)
        most_s = self._pause_max_s
        return [(slot, case) for slot, case in cases if case and is_worth_saving(case, most_s)]

    async def _step_idle(self, work: _Work, worth: _Worth) -> float:
        """Save at most one slot; return the time until the next look."""
        idle_s = self._clock() - work.ended_at_s
        wait_s = {slot: idle_before_save_s(case) - idle_s for slot, case in worth}
        due = [(slot, case) for slot, case in worth if wait_s[slot] <= 0]
        if not due:
            return min(_LOOKS_AGAIN_S, *wait_s.values())
        slot, _ = max(due, key=lambda pair: pair[1].saving_s)
        is_listed = work.listed_at_s > work.ended_at_s
        await self._save_idle(work, slot, is_listed=is_listed)
        return 0.0

    async def _step_busy(self, work: _Work, worth: _Worth) -> float:
        """Save at most the slot that the engine takes next; return the time until the next look."""
        if not worth:
            return _LOOKS_AGAIN_S
        slot, case = worth[0]
        if case.streams and work.instance.free > max(1, work.instance.upstream.slots // 2):
            return _LOOKS_AGAIN_S
        listed_s = self._clock() - work.listed_at_s
        is_listed = slot.is_confirmed and listed_s < _LISTED_S
        wait_s = max(due_in_s(case), 0.0 if is_listed else _LISTED_S - listed_s)
        if wait_s > 0:
            return min(wait_s, _LOOKS_AGAIN_S)
        await self._save_idle(work, slot, is_listed=is_listed)
        return _LISTED_S

    async def _save_idle(self, work: _Work, slot: Slot, *, is_listed: bool) -> None:
        """Save an idle slot, if its content did not change while the engine listed its slots."""
        uses = work.slot_map.uses
        if not is_listed:
            await self._list(work)
        if work.slot_map.uses != uses:
            return
        if saving := self._saving.get(slot):
            await saving.wait()
            return
        is_known = slot.is_confirmed and slot.conversation is not None
        if not (is_known and await self.save(work.instance, slot, slot.content)):
            work.failed[slot] = slot.freed_tick

    async def _list(self, work: _Work) -> None:
        """Find the slots' numbers.

        Skipped while a request gets a slot: the engine's order would differ from ours.
        """
        instance, slot_map = work.instance, work.slot_map
        work.listed_at_s, uses = self._clock(), slot_map.uses
        if slot_map.pending or not all(lease.is_placed for lease in instance.leases):
            return
        with suppress(UpstreamTimeout):
            listed = await self._list_slots(instance.upstream)
            if listed and slot_map.uses == uses:
                slot_map.sync(listed, None, self._clock())
