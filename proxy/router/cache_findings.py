"""Decides, when a response ends, why not more of its prompt was found in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proxy.explanation.cache_finding import (
    CacheFacts,
    CacheFinding,
    CacheKind,
    Earlier,
    Held,
    find_cause,
)
from proxy.explanation.causes import BY_CLIENT, OF_PLACE, TOKENS_MIN
from proxy.prompt_cache.conversations import Conversation
from proxy.prompt_cache.index import PrefixIndex
from proxy.prompt_cache.no_file import NoFile
from proxy.prompt_cache.outline import Hashes
from proxy.prompt_cache.prompt import BLOCK_TOKENS, Prompt, answer_hashes
from proxy.prompt_cache.recent_prompts import RecentPrompt, client_hash, recent_prompt
from proxy.prompt_cache.runs import Run
from proxy.router.lease import Lease
from proxy.router.response_progress import Clock
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream

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
        held = _held(lease, before, run, is_alive=is_alive) if before else Held.UNKNOWN
        earlier = _earlier(before, now_s, is_same=is_same) if before else None
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
            return found.repeating(self._recent.repeated(client, found.cause))
        self._recent.ends_repetition(client)
        return found

    def _own_tokens(self, lease: Lease, prompt: Prompt, tokens: int) -> int:
        """Return how many tokens of a prompt its key itself can have left in caches."""
        client = client_hash(lease.request.model, lease.request.client)
        estimated = BLOCK_TOKENS * self._recent.own_blocks(client, prompt)
        if isinstance(lease.conversation, Conversation):
            known = set(lease.conversation.turn_hashes)
            turns = [at for at, one in enumerate(prompt.turn_hashes[:-1]) if one in known]
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
    held: Held,
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


def _earlier(before: RecentPrompt, now_s: float, *, is_same: bool) -> Earlier:
    return Earlier(
        before.request_id,
        before.run.name,
        before.hashes,
        before.prompt_tokens,
        now_s - before.ended_at_s,
        is_same,
    )


def _held(lease: Lease, before: RecentPrompt, run: Run, *, is_alive: bool) -> Held:
    """Return where the cache of the prompt before was when the request began."""
    if before.run is run:
        if not lease.is_continued or lease.has_own_slot is None:
            return Held.UNKNOWN
        if lease.has_own_slot:
            return Held.SLOT
        return Held.BUSY if lease.is_beside_own else Held.TAKEN
    if is_alive:
        return Held.OTHER
    return Held.CRASHED if before.run.has_failed else Held.UNLOADED


def _kind(upstream: Upstream) -> CacheKind:
    if upstream.resumable_prompts:
        return CacheKind.RECURRENT
    return CacheKind.WINDOW if upstream.has_window else CacheKind.ANY
