"""Where prompts were found, why not more of them, and what the engines are believed to hold.

The engine reports how many tokens of a prompt it found, not where. If a file was restored for the
request, or into its slot as the process began, they are the file's; if the request got the slot of
its conversation, that slot's; else the host cache's, if the engine has one. A prompt that shares
its beginning with whatever its slot held before counts for the host cache too: the engine tells no
difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from proxy.cache.conversations import Conversation
from proxy.cache.host_cache import HostCache
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
from proxy.cache.processes import Run
from proxy.cache.prompt import BLOCK_TOKENS, Hashes, Prompt, answer_hashes
from proxy.observe.cache_finding import BY_CLIENT, OF_PLACE, TOKENS_MIN, CacheFinding, NoFile, Tier
from proxy.router.lease import Clock, Lease
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


@dataclass(slots=True)
class TierUse:
    """Of one model.

    Attributes:
        prompts: Of which at least one token was found there.
        tokens: Found there; of `Tier.NONE`, computed.
        saved_s: What computing these tokens would have taken, less the time of restores.
    """

    prompts: int = 0
    tokens: int = 0
    saved_s: float = 0.0


class CacheUse:
    """Of all models of this machine, without requests of our own."""

    def __init__(self) -> None:
        self._models: dict[str, dict[Tier, TierUse]] = {}

    @property
    def models(self) -> Mapping[str, Mapping[Tier, TierUse]]:
        return self._models

    def note(self, lease: Lease, timings: Timings) -> None:
        """Count a complete response, and note in its lease where its prompt was found."""
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
    """Of all instances of a model on this machine.

    Attributes:
        slots: That instances have.
        conversations: In slots.
        tokens: Of those.
        host_cache_bytes: That engines may keep of prompts that are in no slot; infinity: no limit.
        copied_conversations: That host caches are believed to hold; None where that is not known.
        copied_tokens: Of those, with older copies of some.
        copied_bytes: The same.
    """

    slots: int = 0
    conversations: int = 0
    tokens: int = 0
    host_cache_bytes: float = 0.0
    copied_conversations: int | None = None
    copied_tokens: int = 0
    copied_bytes: float = 0.0

    def add_copies(self, host_cache: HostCache) -> None:
        self.copied_conversations = (self.copied_conversations or 0) + host_cache.conversations
        self.copied_tokens += sum(host_cache.copied_tokens)
        self.copied_bytes += host_cache.used_bytes


def cache_contents(
    upstreams: Iterable[Upstream], prefix_index: PrefixIndex
) -> dict[str, CacheContents]:
    """Return what is held, by model."""
    found: dict[str, CacheContents] = {}
    for upstream in upstreams:
        run = prefix_index.run(upstream.name)
        if run is None or upstream.node:
            continue
        held = found.setdefault(upstream.model, CacheContents())
        held.slots += upstream.slots
        held.conversations += run.slot_map.conversations
        held.tokens += run.slot_map.tokens
        held.host_cache_bytes += upstream.host_cache_bytes
        if run.host_cache:
            held.add_copies(run.host_cache)
    return found


_ASSISTANT: Final = b"a"


class CacheFindings:
    def __init__(self, prefix_index: PrefixIndex, clock: Clock) -> None:
        self._prefix_index = prefix_index
        self._recent = prefix_index.recent
        self._clock = clock

    def find(
        self, lease: Lease, timings: Timings, reply: Mapping[str, Any] | None
    ) -> CacheFinding | None:
        """Return what was found of a lease's prompt, and remember it; None for a short one."""
        request, tokens = lease.request, timings.cached_tokens + timings.prompt_tokens
        if tokens < TOKENS_MIN:
            return None
        conversation, index = lease.conversation, self._prefix_index
        prompt, run = request.prompt, index.run(lease.upstream.name)
        if prompt is None or run is None or not isinstance(conversation, Conversation):
            return None
        if not prompt.outline.hashes:
            return None
        client, now_s = client_hash(request.model, request.client), self._clock()
        known = conversation if lease.is_continued else index.ended_conversation(prompt)
        before, is_same = self._recent.find(client, prompt, known)
        is_alive = before is not None and index.run(before.run.name) is before.run
        held = _find_holder(lease, before, run, is_alive=is_alive) if before else CachePlace.UNKNOWN
        earlier = _earlier_request(before, now_s, is_same=is_same) if before else None
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
        """Return how many tokens of a prompt its key itself can have left in caches."""
        client = client_hash(lease.request.model, lease.request.client)
        estimated = BLOCK_TOKENS * self._recent.own_blocks(client, prompt)
        if isinstance(lease.conversation, Conversation):
            known = set(lease.conversation.turn_hashes)
            turns = [
                at for at, turn_hash in enumerate(prompt.turn_hashes[:-1]) if turn_hash in known
            ]
            estimated = max(estimated, prompt.tokens_until(turns[-1]) if turns else 0)
        return min(tokens, round(estimated * tokens / prompt.tokens))

    def _no_file(self, lease: Lease, known: Conversation | None) -> NoFile | None:
        """Return why what was lost was in no slot file either; None where that is not known."""
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


def _earlier_request(before: RecentPrompt, now_s: float, *, is_same: bool) -> Earlier:
    return Earlier(
        before.request_id,
        before.run.name,
        before.hashes,
        before.prompt_tokens,
        now_s - before.ended_at_s,
        is_same,
    )


def _find_holder(lease: Lease, before: RecentPrompt, run: Run, *, is_alive: bool) -> CachePlace:
    """Return where the cache of the prompt before was when the request began."""
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
