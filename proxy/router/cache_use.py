"""Use of the caches: the tier in which prompts were found, causes of misses, expected contents.

The engine reports how many tokens of a prompt it found, but not in which cache. They count for the
slot file, if one was restored for the request or when the process began; for the slot, if the
request got the slot of its conversation; otherwise for the host cache, if the engine has one. A
prompt that shares its beginning with the slot's previous content also counts for the host cache,
because the engine does not report the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.cache.conversations import Conversation, Run
from proxy.cache.index import PrefixIndex
from proxy.cache.miss_cause import (
    CacheFacts,
    CacheKind,
    CachePlace,
    Earlier,
    RecentPrompt,
    client_hash,
    find_cause,
    recent_prompt,
)
from proxy.cache.prompt import BLOCK_TOKENS, Hashes, Prompt, answer_hashes
from proxy.observe.cache_finding import BY_CLIENT, OF_PLACE, TOKENS_MIN, CacheFinding, NoFile, Tier
from proxy.router.lease import Clock, Lease
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


@dataclass(slots=True)
class TierUse:
    """The use of one tier of a model's caches.

    Attributes:
        prompts: Prompts with at least one token found in the tier.
        tokens: Tokens found in the tier; for `Tier.NONE`, computed tokens.
        saved_s: Estimated time to compute these tokens, minus the time of restores.
    """

    prompts: int = 0
    tokens: int = 0
    saved_s: float = 0.0


class CacheUse:
    """The use of caches by clients' requests, for all models of this machine."""

    def __init__(self) -> None:
        self._models: dict[str, dict[Tier, TierUse]] = {}

    @property
    def models(self) -> Mapping[str, Mapping[Tier, TierUse]]:
        return self._models

    def note(self, lease: Lease, timings: Timings) -> None:
        """Count a complete response, and set the tier of its lease."""
        if lease.upstream.node or lease.request.is_background:
            return
        found = timings.cached_tokens
        tiers = self._models.get(lease.request.model)
        if tiers is None:
            tiers = self._models[lease.request.model] = {tier: TierUse() for tier in Tier}
        tiers[Tier.NONE].tokens += timings.prompt_tokens
        lease.tier = _tier(lease) if found else Tier.NONE
        use = tiers[lease.tier]
        use.prompts += 1
        use.tokens += found
        use.saved_s += max(0.0, found / lease.instance.rates.prefill_tps - lease.restore_s)


def _tier(lease: Lease) -> Tier:
    if lease.restored or lease.restored_tokens:
        return Tier.DISK
    is_elsewhere = lease.has_own_slot is False and lease.upstream.host_cache_bytes > 0
    return Tier.HOST_CACHE if is_elsewhere else Tier.SLOT


@dataclass(slots=True)
class CacheContents:
    """The expected cache contents of a model's instances on this machine.

    Attributes:
        slots: The number of slots.
        conversations: Conversations in slots.
        tokens: Tokens of these conversations.
        host_cache_bytes: Limit of the host caches, for prompts in no slot; infinity: no limit.
        copied_conversations: Conversations expected in host caches; None if unknown.
        copied_tokens: Tokens in host caches, older copies included.
        copied_bytes: Bytes in host caches, older copies included.
    """

    slots: int = 0
    conversations: int = 0
    tokens: int = 0
    host_cache_bytes: float = 0.0
    copied_conversations: int | None = None
    copied_tokens: int = 0
    copied_bytes: float = 0.0


def cache_contents(
    upstreams: Iterable[Upstream], prefix_index: PrefixIndex
) -> dict[str, CacheContents]:
    found: dict[str, CacheContents] = {}
    for upstream in upstreams:
        slot_map = prefix_index.slot_maps.get(upstream.name)
        if slot_map is None or upstream.node:
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


class CacheFindings:
    """Finds why a prompt, or part of it, was not in a cache."""

    def __init__(self, prefix_index: PrefixIndex, clock: Clock) -> None:
        self._prefix_index = prefix_index
        self._recent = prefix_index.recent
        self._clock = clock

    def find(
        self, lease: Lease, timings: Timings, reply: Mapping[str, Any] | None
    ) -> CacheFinding | None:
        """Return the finding about a lease's prompt, and remember it; None for a short prompt."""
        request, tokens = lease.request, timings.cached_tokens + timings.prompt_tokens
        if tokens < TOKENS_MIN:
            return None
        conversation, index = lease.conversation, self._prefix_index
        prompt, run = request.prompt, index.run(lease.upstream.name)
        if prompt is None or run is None or conversation is None:
            return None
        if not prompt.outline.hashes:
            return None
        client, now_s = client_hash(request.model, request.client), self._clock()
        known = conversation if lease.is_continued else index.ended_conversation(prompt)
        before, is_same = self._recent.find(client, prompt, known)
        is_alive = before is not None and index.run(before.run.name) is before.run
        held = _find_holder(lease, before, run, is_alive=is_alive) if before else CachePlace.UNKNOWN
        earlier = None
        if before:
            earlier = Earlier(
                before.request_id,
                before.run.name,
                before.hashes,
                before.prompt_tokens,
                now_s - before.ended_at_s,
                is_same,
            )
        shares = request.owner.name and not request.owner.is_alone
        own = self._own_tokens(lease, prompt, tokens) if shares else None
        found = find_cause(_facts(lease, prompt, timings, held, earlier, own))
        if own is not None and own < max(found.found, found.reusable):
            found = found._replace(own=own)
        if found.cause in OF_PLACE and not lease.restored:
            found = found.without_file(self._no_file(lease, known))
        recent = recent_prompt(
            request.request_id, run, prompt, answer_hashes(reply), (now_s, tokens), client
        )
        self._recent.add(client, conversation, recent)
        if found.cause in BY_CLIENT:
            return found.repeating(self._recent.count_repetitions(client, found.cause))
        self._recent.ends_repetition(client)
        return found

    def _own_tokens(self, lease: Lease, prompt: Prompt, tokens: int) -> int:
        """Return the tokens of a prompt that requests of the same key can have left in caches."""
        client = client_hash(lease.request.model, lease.request.client)
        estimated = BLOCK_TOKENS * self._recent.own_blocks(client, prompt)
        if lease.conversation:
            known = set(lease.conversation.turn_hashes)
            turns = [
                at for at, turn_hash in enumerate(prompt.turn_hashes[:-1]) if turn_hash in known
            ]
            estimated = max(estimated, prompt.tokens_until(turns[-1]) if turns else 0)
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


def _facts(
    lease: Lease,
    prompt: Prompt,
    timings: Timings,
    held: CachePlace,
    earlier: Earlier | None,
    own: int | None,
) -> CacheFacts:
    return CacheFacts(
        Hashes(prompt.outline, prompt.blocks),
        timings.cached_tokens + timings.prompt_tokens,
        timings.cached_tokens,
        lease.expected_cached if own is None else min(own, lease.expected_cached),
        lease.upstream.name,
        held,
        _kind(lease.upstream),
        earlier,
        is_continued=_ASSISTANT in prompt.outline.labels,
        is_known=lease.is_continued,
        is_awaited=lease.has_awaited_owner,
        is_cache_off=lease.request.json.get("cache_prompt") is False,
        tier=lease.tier,
        restore_ms=round(1000 * lease.restore_s, 1) if lease.restored else None,
    )


def _find_holder(lease: Lease, before: RecentPrompt, run: Run, *, is_alive: bool) -> CachePlace:
    """Return the state of the earlier prompt's cache when the request began."""
    if before.run is run:
        if not lease.is_continued or lease.has_own_slot is None:
            return CachePlace.UNKNOWN
        if lease.has_own_slot:
            return CachePlace.SLOT
        return CachePlace.BUSY if lease.is_beside_own else CachePlace.TAKEN
    if is_alive:
        return CachePlace.OTHER
    return CachePlace.CRASHED if before.run.has_failed else CachePlace.UNLOADED


def _kind(upstream: Upstream) -> CacheKind:
    if upstream.resumable_prompts:
        return CacheKind.RECURRENT
    return CacheKind.WINDOW if upstream.has_window else CacheKind.ANY
