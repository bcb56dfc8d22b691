"""Chooses the slot of a request, and learns the contents of the caches from its response.

`proxy.cache.slot_map` explains why and how slots are tracked; `SlotSelector` makes the engine use
the chosen one.

The engine reports how many tokens of a prompt it found, but not in which cache. They count for the
slot file, if one was restored for the request or when the process began; for the slot, if the
request got the slot of its conversation; otherwise for the host cache, if the engine has one. A
prompt that shares its beginning with the slot's previous content also counts for the host cache,
because the engine does not report the difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from attrs import define

from proxy.cache.fingerprint import lora_of
from proxy.cache.holders import Conversation, Run
from proxy.cache.host_cache import SlotContent
from proxy.cache.index import PrefixIndex
from proxy.cache.miss_cause import (
    CacheFacts,
    CacheKind,
    CachePlace,
    RecentPrompt,
    client_hash,
    find_cause,
    recent_prompt,
)
from proxy.cache.prompt import BLOCK_TOKENS, Prompt, shared_blocks
from proxy.cache.shared_prefixes import BEGINNING_BLOCKS_MIN
from proxy.cache.slot_map import CONFIRMED, Slot, SlotMap, SlotOwners
from proxy.errors import UpstreamTimeout
from proxy.observe.cache_finding import BY_CLIENT, OF_PLACE, CacheFinding, NoFile, Tier
from proxy.request.request import ProxyRequest, is_single
from proxy.router.lease import Clock, Lease, RoutingTarget
from proxy.router.node_files import NodeFileTaker
from proxy.router.registry import Instances
from proxy.router.slot_saver import SlotSaver
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import clear_slots, get_slots, refresh_slots
from proxy.upstream.upstream import Timings

# A shorter conversation is worth neither a wait for its file nor a request that names no slot.
_TOKENS_MIN: Final = 256
# The longest wait, relative to the time to compute the prompt.
_SHARE_MAX: Final = 0.5
_WAIT_MAX_S: Final = 1.0


# Computing fewer tokens is as fast as saving them.
_WORTH_TOKENS: Final = 128
# The engine lists its slots when its batch ends, and begins no request before that. So this wait
# costs a request nothing; without the list its prompt may be computed again.
_LISTED_TIMEOUT_S: Final = 20.0
# Requests overtake each other within milliseconds.
_PLACED_MAX_S: Final = 1.0
_NAMES_SLOTS: Final = frozenset(
    {
        EndpointKind.CHAT,
        EndpointKind.COMPLETION,
        EndpointKind.RESPONSES,
        EndpointKind.LLAMA_COMPLETION,
    }
)


# How a request can get a certain slot: it names the slot; or all other idle slots are used once,
# and the engine takes the least recently used one.
SlotTargeting = Literal["none", "by id", "by lru"]


def targeting(request: ProxyRequest) -> SlotTargeting:
    if request.kind is EndpointKind.MESSAGES:  # its translation drops unknown members
        return "by lru"
    names = request.kind in _NAMES_SLOTS
    # Infill names its slot only if it must: its prompt in the engine's cache is not tracked well.
    names = names or (request.kind is EndpointKind.INFILL and request.owner.is_alone)
    is_named = names and bool(request.json) and not request.form
    return "by id" if is_named and is_single(request.json) else "none"


@define(eq=False, slots=False)
class SlotSelector:
    """Selects slots on all instances."""

    _prefix_index: PrefixIndex
    _instances: Instances
    _settings: ProxySettings
    _saver: SlotSaver
    _taker: NodeFileTaker

    async def select(self, lease: Lease) -> None:
        """Set a lease's slot, and `id_slot` if its request must name it.

        Call right before the request is sent: the engine assigns slots in the order of arrival.
        """
        request, upstream = lease.request, lease.upstream
        is_tracked = upstream.can_name_slots and request.kind.takes_slot
        if not is_tracked or self._settings.policy != "affinity":
            await self.enter(lease)
            return
        slot_map, reach = self._prefix_index.slot_maps[upstream.name], targeting(request)
        conversation = lease.conversation if reach != "none" else None
        # At once: a client may leave while the slot is prepared.
        lease.slot = slot = slot_map.reserve(lease, conversation, lease.clock())
        known = slot if slot and reach == "by id" and slot.certainty == CONFIRMED else None
        if known and known.content.conversation:  # the next turn, where the last one was
            lease.id_slot = known.id_slot
            await self._enter_slot(lease, slot_map, known, reach)
            return
        if not upstream.cache_key:
            await self._prepare(lease, slot_map, reach, is_alone=True)
            return
        await self._taker.take(lease)
        order, is_ready = lease.instance.slot_order, False
        if known and self._saver.has_file(lease, known):  # others are prepared meanwhile
            async with order.reader:
                is_ready = await self._prepare(lease, slot_map, reach, is_alone=False)
        if not is_ready:
            async with order.writer:
                await self._prepare(lease, slot_map, reach, is_alone=True)

    async def aim(self, lease: Lease) -> None:
        """Make the engine take a lease's slot, known by now, for a request that cannot name it."""
        slot, number = lease.slot, lease.id_slot
        if slot is None or number is None or targeting(lease.request) != "by lru":
            return
        slot_map = self._prefix_index.slot_maps[lease.upstream.name]
        slot_map.confirm(slot, number)
        await self._refresh(lease, slot_map.mark_refreshed(slot))
        lease.id_slot = None

    async def _prepare(
        self, lease: Lease, slot_map: SlotMap, reach: SlotTargeting, *, is_alone: bool
    ) -> bool:
        """Make the engine use the reserved slot; `is_alone`: no other is prepared meanwhile.

        Returns False, if it is not alone, for a slot without its conversation: without a name, the
        engine could take a slot that is being filled for another request.
        """
        slot = lease.slot
        if slot and reach != "none" and lease.conversation is not None:
            lease.slot = slot = await self._target(lease, slot_map, slot, reach)
        if not is_alone and (slot is None or slot.conversation is None):
            return False
        if slot is None:
            await self.enter(lease)
        else:
            if reach == "by id" and _names_slot(lease, slot_map, slot):
                lease.id_slot = slot.id_slot
            await self._enter_slot(lease, slot_map, slot, reach)
        for slot_lease in lease.beside:
            if tracked := slot_map.reserve(slot_lease, None, lease.clock()):
                slot_lease.slot = tracked
                slot_map.mark_sent(tracked, is_named=False)
        return True

    async def _enter_slot(
        self, lease: Lease, slot_map: SlotMap, slot: Slot, reach: SlotTargeting
    ) -> None:
        """Return once the request may be sent to its slot, and note that it is."""
        request, is_own = lease.request, slot.content.conversation is not None
        lease.has_own_slot = is_own and lease.restored is None
        lease.is_beside_own = not is_own and slot_map.is_in_use(lease.conversation)
        if request.owner.is_alone or slot_map.owners.has_alone:
            await self._separate(lease, slot_map, slot, reach)
        await self.enter(lease)
        is_restored = slot.content.task is not None and slot.verifies_restore(request.prompt)
        has_cache = not lease.is_cache_off and request.json.get("cache_prompt") is not False
        if is_restored and has_cache:
            lease.restored_tokens = slot.content.tokens
        if lease.id_slot is None:
            await _wait_until_begun(lease.instance, are_named=True)
            if slot.is_confirmed and slot_map.is_kept_before(slot):
                await self._refresh(lease, slot_map.mark_refreshed(slot))
            await self._keep_paused(lease, slot_map)
        slot_map.mark_sent(
            slot,
            is_named=lease.id_slot is not None,
            conversation=lease.conversation,
            blocks=request.prompt.blocks if request.prompt else (),
        )

    async def _separate(
        self, lease: Lease, slot_map: SlotMap, slot: Slot, reach: SlotTargeting
    ) -> None:
        """Separate a request from content of other owners: it names its slot, if it can."""
        owner, owners = lease.request.owner, slot_map.owners
        if reach == "by id" and lease.id_slot is None and owners.has_others(owner):
            if not slot.is_confirmed:
                await self._sync(lease, slot_map, slot)
            if slot.is_confirmed:
                lease.id_slot = slot.id_slot
        # A slot file is found by its owner's hashes, so restored content is the owner's.
        is_own = lease.conversation is not None and slot.conversation is lease.conversation
        if lease.restored or (is_own and slot.content.task is not None and slot.is_confirmed):
            owners.fill(owner, lease.id_slot)

    async def enter(self, lease: Lease) -> None:
        """Wait until a request cannot find content that another key left in the engine.

        Registers the owner of the request, and sets whether it may reuse the engine's content.

        Raises:
            UpstreamFailed, UpstreamTimeout: The content of others could not be cleared.
        """
        request, upstream = lease.request, lease.upstream
        if request.is_background or not request.kind.takes_slot:
            return
        if upstream.node:  # a llama-corral gets the owner with the request
            lease.is_cache_off = request.owner.is_alone and not upstream.node.takes_keep_alive
        else:
            owners = self._prefix_index.slot_maps[upstream.name].owners
            if upstream.reuses_vectors and (request.owner.is_alone or owners.has_alone):
                await self._take_turn(lease, owners)
            else:
                self._begin(lease, owners)
            while owners.has_alone and owners.must_wait(lease):
                await lease.instance.wait_placed()
        if lease.is_cache_off:
            lease.expected_cached = 0

    async def _take_turn(self, lease: Lease, owners: SlotOwners) -> None:
        """Reserve the engine for one owner's requests, with no content of others in its slots.

        Later requests wait behind this one, also those of the previous owner.
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

    async def _target(
        self, lease: Lease, slot_map: SlotMap, slot: Slot, reach: SlotTargeting
    ) -> Slot | None:
        """Return the slot for a conversation; it holds the conversation if possible."""
        found: Slot | None = slot
        if slot.conversation is None:
            slot_map.note_return(lease.conversation)
        elif not slot.is_confirmed:  # the engine's list tells whether it still holds it
            await self._sync(lease, slot_map, slot)
            if not slot.is_confirmed:
                found = slot_map.rebind(slot, lease.conversation, lease.clock())
        if found is None:
            return None
        if lease.upstream.cache_key:
            found = await self._fill(lease, slot_map, found)
        if found.conversation is None:
            return await self._target_new(lease, slot_map, found)
        if reach == "by lru":
            await self._refresh(lease, slot_map.mark_refreshed(found))
        return found

    async def _fill(self, lease: Lease, slot_map: SlotMap, slot: Slot) -> Slot:
        """Fill a slot from a file if that pays and its number is known; return the slot."""
        if slot.conversation is not None:
            await self._catch_up(lease, slot)
            return slot
        prompt = lease.request.prompt
        if prompt and _ASSISTANT in prompt.outline.labels:  # another daemon may have it
            await self._saver.look(lease.upstream.name)
        await self._wait_for_file(lease)
        await self._take_from_other(lease)
        if not self._saver.is_wanted(lease, slot):
            return slot
        if not slot.is_confirmed:
            await self._sync(lease, slot_map, slot)
            slot = slot_map.reserve_lru(slot)
        if slot.is_confirmed:
            await _wait_until_begun(lease.instance, are_named=False)
            await self._saver.fill(lease, slot)
        return slot

    async def _catch_up(self, lease: Lease, slot: Slot) -> None:
        """Fill the slot of a conversation if another daemon has answered and saved later turns."""
        blocks = lease.request.prompt.blocks if lease.request.prompt else ()
        is_behind = len(blocks) - len(slot.in_engine.blocks) >= BEGINNING_BLOCKS_MIN
        if is_behind and slot.is_confirmed:
            await self._saver.look(lease.upstream.name)
            if self._saver.has_file(lease, slot):
                await self._saver.fill(lease, slot)

    async def _wait_for_file(self, lease: Lease) -> None:
        """Wait until a file has a draining instance's content, unless computing it is faster.

        Such an instance saves its slots when it drains or their requests end, but a client that
        continues at once would come before the file is verified and stored, about 0.1 s later.
        """
        prompt, files = lease.request.prompt, self._prefix_index.files
        left = self._left_behind(lease) if lease.is_continued else None
        if prompt is None or left is None:
            return
        content = left.content
        compute_s = content.tokens / lease.instance.rates.prefill_tps
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAIT_MAX_S, _SHARE_MAX * compute_s)):
                while True:
                    found = files.find(lease.upstream.cache_key, prompt)
                    if found and len(found.file.fingerprint.blocks) >= len(content.blocks):
                        return
                    await files.added.wait()

    async def _take_from_other(self, lease: Lease) -> None:
        """Have another instance save its part of a prompt, unless computing it is faster."""
        prompt, upstream, files = lease.request.prompt, lease.upstream, self._prefix_index.files
        if prompt is None:
            return
        blocks, other, slot = self._held_elsewhere(lease, prompt)
        more = blocks - self._prefix_index.available_blocks(upstream, prompt)
        if other is None or slot is None or more < BEGINNING_BLOCKS_MIN:
            return
        measures = self._prefix_index.measures[upstream.model]
        size_bytes = slot.content.tokens * upstream.token_bytes + upstream.state_bytes
        transfer_s = measures.transfer_s(size_bytes)
        compute_s = more * BLOCK_TOKENS / lease.instance.rates.prefill_tps
        if transfer_s > _SHARE_MAX * compute_s:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_WAIT_MAX_S, _SHARE_MAX * compute_s)):
                await self._saver.save_for_others(other, slot)
                while slot.content.is_saved:
                    found = files.find(upstream.cache_key, prompt)
                    if found and found.blocks >= blocks:
                        return
                    await files.added.wait()

    def _held_elsewhere(
        self, lease: Lease, prompt: Prompt
    ) -> tuple[int, RoutingTarget | None, Slot | None]:
        """Return the idle slot of another instance that holds most blocks of a prompt."""
        best: tuple[int, RoutingTarget | None, Slot | None] = (0, None, None)
        upstream = lease.upstream
        if upstream.is_all_or_nothing:
            return best
        for run in self._prefix_index.with_files.values():
            other = self._instances.get(run.name)
            if other and run.name != upstream.name and run.cache_key == upstream.cache_key:
                for slot in self._prefix_index.slot_maps[run.name].idle:
                    blocks = shared_blocks(slot.content.blocks, prompt.blocks)
                    if slot.conversation and blocks > best[0]:
                        best = blocks, other, slot
        return best

    def _left_behind(self, lease: Lease) -> Slot | None:
        """Return a slot of a draining instance that holds the conversation."""
        for run in self._prefix_index.with_files.values():
            instance = self._instances.get(run.name)
            is_draining = not run.has_ended and (instance is None or not instance.in_service)
            if is_draining and run.cache_key == lease.upstream.cache_key:
                slot = self._prefix_index.slot_maps[run.name].find(lease.conversation)
                if slot and slot.content.tokens >= _TOKENS_MIN:
                    return slot
        return None

    async def _target_new(self, lease: Lease, slot_map: SlotMap, slot: Slot) -> Slot:
        """Make the engine copy its other idle slots to the host cache, for shared prefixes.

        Only if a new conversation shares its beginning with an unsaved one. Any task makes the
        engine copy. An empty task, in a slot without a conversation, makes it copy all other slots;
        they are then refreshed, so that the request gets that slot.
        """
        if lease.expected_cached < _WORTH_TOKENS or not slot_map.has_unsaved(slot):
            return slot
        await self._sync(lease, slot_map, slot)
        slot = slot_map.reserve_lru(slot)
        if slot.is_confirmed:
            await self._refresh(lease, [slot])
            await self._refresh(lease, slot_map.mark_refreshed(slot))
        return slot

    async def _refresh(self, lease: Lease, slots: Iterable[Slot]) -> None:
        """Use idle slots, each with the adapters that computed its content."""
        adapters = len(lease.request.prompt.scales) if lease.request.prompt else 0
        contents = {slot.id_slot: slot.in_engine.conversation for slot in slots}
        loras = {
            id_slot: lora_of(held.scales if held and held.scales else (0.0,) * adapters)
            for id_slot, held in contents.items()
        }
        await refresh_slots(lease.upstream, loras, self._settings)

    async def _sync(self, lease: Lease, slot_map: SlotMap, slot: Slot) -> None:
        began_at_s = lease.clock()
        with suppress(UpstreamTimeout):
            found = await get_slots(lease.upstream, self._settings, _LISTED_TIMEOUT_S) or ()
            slot_map.sync(found, slot, lease.clock())
        lease.slots_s += lease.clock() - began_at_s

    async def _keep_paused(self, lease: Lease, slot_map: SlotMap) -> None:
        """Refresh slots whose prompts pause between two chunks, so that the engine takes none."""
        paused = [other for other in lease.instance.leases if other.is_paused and other.slot]
        if not paused:
            return
        slots = [other.id_slot for other in paused if other.id_slot is not None]
        # Prompts that adapters compute do not pause.
        await refresh_slots(lease.upstream, dict.fromkeys(slots), self._settings)
        for other in paused:
            if other.slot:
                slot_map.mark_used(other.slot)


def _names_slot(lease: Lease, slot_map: SlotMap, slot: Slot) -> bool:
    """Return whether a request names its slot.

    Without a name, the prompt's slot would be a guess. With a name, the engine looks for the prompt
    only in that slot: it neither copies the slot to the host cache, nor looks for the prompt there.

    Without a name, the request can also get another slot than expected: several become free at the
    same moment, and the order is known only to the engine. A request that names that slot then
    waits for a whole answer.
    """
    if slot.conversation is not None:
        return slot.is_confirmed
    if not lease.upstream.cache_key or lease.yielded:  # the engine finds all that it computed
        return False
    if slot_map.is_lost_if_named(slot) and _is_worth_keeping(slot.previous):
        return False
    prompt, conversation = lease.request.prompt, lease.conversation
    return not prompt or not slot_map.is_elsewhere(slot, conversation, prompt.blocks)


def _is_worth_keeping(content: SlotContent | None) -> bool:
    """Return whether content is long, or that of a request which waits to go on."""
    if content is None or content.conversation is None:
        return False
    return content.tokens >= _TOKENS_MIN or content.conversation.is_paused


async def _wait_until_begun(instance: RoutingTarget, *, are_named: bool) -> None:
    """Wait until the engine has begun with the requests sent before; `are_named`: that name slots.

    It reads requests side by side. If it came to a later one first, that would take a slot in which
    content was restored or kept for an earlier one; or a file would overwrite a slot that the
    earlier one makes the engine copy to its host cache.
    """

    def is_underway(lease: Lease) -> bool:
        is_sent = lease.slot is not None and lease.slot.is_sent
        is_meant = lease.id_slot is not None or not are_named
        return is_sent and is_meant and not (lease.is_placed or lease.is_ending or lease.chunked)

    if any(map(is_underway, instance.leases)):
        with suppress(TimeoutError):
            async with asyncio.timeout(_PLACED_MAX_S):
                while any(map(is_underway, instance.leases)):
                    await instance.wait_placed()


@dataclass(slots=True)
class TierUse:
    """The use of one tier of a model's caches."""

    prompts: int = 0  # Prompts with at least one token found in the tier.
    tokens: int = 0  # Tokens found in the tier; for `Tier.NONE`, computed tokens.
    saved_s: float = 0.0  # Estimated time to compute these tokens, minus the time of restores.


class CacheUse:
    """The use of caches by clients' requests, for all models of this machine."""

    def __init__(self) -> None:
        self.models: dict[str, dict[Tier, TierUse]] = {}

    def note(self, lease: Lease, timings: Timings) -> None:
        """Count a complete response, and set the tier of its lease."""
        if lease.upstream.node or lease.request.is_background:
            return
        found = timings.cached_tokens
        tiers = self.models.get(lease.request.model)
        if tiers is None:
            tiers = self.models[lease.request.model] = {tier: TierUse() for tier in Tier}
        tiers[Tier.NONE].tokens += timings.prompt_tokens
        lease.tier = _tier(lease) if found else Tier.NONE
        use = tiers[lease.tier]
        use.prompts += 1
        use.tokens += found
        lease.saved_s = max(0.0, found / lease.instance.rates.prefill_tps - lease.restore_s)
        use.saved_s += lease.saved_s


def _tier(lease: Lease) -> Tier:
    if lease.restored or lease.restored_tokens:
        return Tier.DISK
    is_elsewhere = lease.has_own_slot is False and lease.upstream.host_cache_bytes > 0
    return Tier.HOST_CACHE if is_elsewhere else Tier.SLOT


@dataclass(slots=True)
class CacheContents:
    """The expected cache contents of a model's instances on this machine."""

    slots: int = 0  # The number of slots.
    conversations: int = 0  # Conversations in slots.
    tokens: int = 0  # Tokens of these conversations.
    # Limit of the host caches, for prompts in no slot; infinity: no limit.
    host_cache_bytes: float = 0.0
    # Conversations expected in host caches; None if unknown.
    copied_conversations: int | None = None
    copied_tokens: int = 0  # Tokens in host caches, older copies included.
    copied_bytes: float = 0.0  # Bytes in host caches, older copies included.


def cache_contents(
    instances: Iterable[RoutingTarget], slot_maps: Mapping[str, SlotMap]
) -> dict[str, CacheContents]:
    found: dict[str, CacheContents] = {}
    for instance in instances:
        upstream, slot_map = instance.upstream, slot_maps.get(instance.upstream.name)
        if slot_map is None:
            continue
        held = found.setdefault(upstream.model, CacheContents())
        held.slots += upstream.slots
        held.conversations += slot_map.conversations
        held.tokens += slot_map.tokens
        held.host_cache_bytes += upstream.host_cache_bytes
        if host_cache := slot_map.host_cache:
            held.copied_conversations = (held.copied_conversations or 0) + host_cache.conversations
            held.copied_tokens += sum(host_cache.copied_tokens)
            held.copied_bytes += host_cache.used_bytes
    return found


_ASSISTANT: Final = b"a"
# A shorter wait or hold is not explained.
_NOTED_S: Final = 0.05


def _noted_ms(wait_s: float) -> float | None:
    return round(1000 * wait_s, 1) if wait_s >= _NOTED_S else None


class CacheFindings:
    """Finds why a prompt, or part of it, was not in a cache."""

    def __init__(self, prefix_index: PrefixIndex, clock: Clock) -> None:
        self._prefix_index = prefix_index
        self._recent = prefix_index.recent
        self._clock = clock

    def find(
        self, lease: Lease, timings: Timings, reply: Mapping[str, Any] | None
    ) -> CacheFinding | None:
        """Return the finding about a lease's prompt of `TOKENS_MIN` or more, and remember it."""
        request, tokens = lease.request, timings.cached_tokens + timings.prompt_tokens
        conversation, index = lease.conversation, self._prefix_index
        prompt, run = request.prompt, index.run(lease.upstream.name)
        if prompt is None or run is None or conversation is None:
            return None
        if not prompt.outline.hashes:
            return None
        client, now_s = client_hash(request.model, request.client), self._clock()
        known = conversation if lease.is_continued else index.ended_conversation(prompt)
        before, is_same = self._recent.find(client, prompt, known)
        held = _find_holder(lease, before, run) if before else "unknown"
        shares = request.owner.name and not request.owner.is_alone
        own = self._own_tokens(lease, prompt, tokens) if shares else None
        kind: CacheKind = "window" if lease.upstream.window_tokens else "any"
        if lease.upstream.resumable_prompts:
            kind = "recurrent"
        found = find_cause(
            CacheFacts(
                prompt,
                tokens,
                timings.cached_tokens,
                lease.expected_cached if own is None else min(own, lease.expected_cached),
                held,
                kind,
                before,
                now_s - before.ended_at_s if before else 0.0,
                is_same_conversation=is_same,
                is_continued=_ASSISTANT in prompt.outline.labels,
                is_known=lease.is_continued,
                is_awaited=lease.has_awaited_owner,
                is_cache_off=request.json.get("cache_prompt") is False,
                tier=lease.tier,
                restore_ms=round(1000 * lease.restore_s, 1) if lease.restored else None,
            )
        )
        if lease.saved_s:
            found = found._replace(saved_ms=round(1000 * lease.saved_s, 1))
        if own is not None and own < max(found.found, found.reusable):
            found = found._replace(own=own)
        if lease.queued_s or lease.held_s:
            found = found._replace(
                beginning_wait_ms=_noted_ms(lease.beginning_wait_s),
                held_ms=_noted_ms(lease.held_s),
                hold_wait_ms=_noted_ms(lease.hold_wait_s),
            )
        if found.cause in OF_PLACE and not lease.restored:
            found = found.without_file(self._no_file(lease, known))
        recent = recent_prompt(request.request_id, run, prompt, reply, (now_s, tokens), client)
        self._recent.add(conversation, recent)
        cause = found.cause if found.cause in BY_CLIENT else None
        found = found.repeating(self._recent.count_repetitions(client, cause))
        return (
            self._recent.with_changes(found, before, prompt, request.kind, request.json)
            if cause
            else found
        )

    def _own_tokens(self, lease: Lease, prompt: Prompt, tokens: int) -> int:
        """Return the tokens of a prompt that requests of the same key can have left in caches."""
        client = client_hash(lease.request.model, lease.request.client)
        estimated = BLOCK_TOKENS * self._recent.own_blocks(client, prompt)
        if lease.conversation:
            estimated = max(estimated, lease.conversation.known_tokens(prompt))
        return min(tokens, round(estimated * tokens / prompt.tokens))

    def _no_file(self, lease: Lease, known: Conversation | None) -> NoFile | None:
        """Return why no slot file had the lost tokens; None if unknown."""
        cache_key = lease.upstream.cache_key
        if not cache_key:
            return None if lease.upstream.node else NoFile.OFF
        if lease.restore_s:
            return NoFile.FAILED
        if known is None:
            return None
        return self._prefix_index.files.why_missing(cache_key, known.turn_hashes) or known.no_file


def _find_holder(lease: Lease, before: RecentPrompt, run: Run) -> CachePlace:
    """Return the state of the earlier prompt's cache when the request began."""
    if before.run is run:
        if not lease.is_continued or lease.has_own_slot is None:
            return "unknown"
        if lease.has_own_slot:
            return "slot"
        return "busy" if lease.is_beside_own else "taken"
    if before.run.is_latest:
        return "other"
    return "crashed" if before.run.has_failed else "unloaded"
