"""Computes a long prompt in chunks while other sequences decode on its instance.

An engine computes as much of a prompt in one pass as its batch holds, and all streams wait for that
pass. So on an instance that prefers pure decode, the proxy first sends growing prefixes of the
prompt, in tokens, to the slot that the request will use, and after each leaves the engine to the
streams for a quarter as long. The request then finds its prefix in the slot. Whatever fails
here, the request is sent as it is.

Source: llama-server, build 10434: `n_predict` 0 computes a prompt and answers when it is in the
slot's cache; `/v1/chat/completions` tokenizes what `/apply-template` returns, with special tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, TypeGuard

import orjson
from multidict import CIMultiDict

from proxy.endpoints import EndpointKind, is_single
from proxy.errors import UpstreamConnectFailed, UpstreamFailed, UpstreamTimeout
from proxy.forward.chunk_sizes import is_worth, next_end, pause_s, rate_tps
from proxy.headers import JSON
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, fetch
from proxy.upstream.slots import get_slots
from proxy.upstream.timings import Timings

# A chunk takes the pass that is under way and its own; with another long prompt, some more.
_STEP_TIMEOUT_S: Final = 20.0
_ANSWER_MAX_BYTES: Final = 32 * 1024**2
_TEXTS: Final = frozenset({EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION})


def has_chunks(lease: Lease) -> bool:
    """Return whether a prompt is computed in chunks: a long one of text, beside running streams.

    Not on a recurrent model: a chunk shorter than what the slot holds would discard its state.
    """
    upstream, tps = lease.upstream, lease.instance.rates.prefill_tps
    prefers = upstream.prefer_pure_decode and not upstream.resumable_prompts
    may_name = prefers and lease.slot is not None and upstream.node is None
    may_name = may_name and not lease.is_cache_off
    is_long = may_name and is_worth(lease.backlog_tokens, tps) and lease.instance.work.decoding > 0
    return is_long and _is_plain_text(lease.request)


class PrefillChunks:
    """The prompt of one request, up to the part that the request itself computes."""

    def __init__(self, lease: Lease, router: Router, settings: ProxySettings) -> None:
        self._lease = lease
        self._router = router
        self._settings = settings
        self._tps = lease.instance.rates.prefill_tps

    async def compute(self) -> None:
        """Compute the prompt in chunks for as long as others decode, and name its slot.

        Raises:
            UpstreamConnectFailed: The instance refused or closed a connection.
        """
        tokens = await self._tokens()
        if not (tokens and await self._fits(len(tokens))):
            return
        try:
            await self._grow(tokens)
        finally:
            self._lease.is_paused = False

    async def _grow(self, tokens: Sequence[int]) -> None:
        done = self._lease.expected_cached
        while self._lease.instance.work.decoding:
            end = next_end(done, len(tokens), self._tps)
            if end is None:
                return
            async with self._lease.instance.chunk_turn:  # two chunks would make one long pass
                if not await self._compute_to(tokens[:end], len(tokens), done):
                    return
            done = end

    async def _compute_to(self, tokens: Sequence[int], total: int, before: int) -> bool:
        """Compute a prefix, then leave the engine to the streams; return whether to go on."""
        lease = self._lease
        lease.is_paused = False
        self._router.note_chunk(lease)
        answer = await self._post("/completion", _chunk(tokens, lease.id_slot)) or {}
        timings, slot = Timings.read(answer.get("timings")), answer.get("id_slot")
        is_first = lease.chunked is None
        if timings is None or not isinstance(slot, int):
            if not is_first:  # another request may use the slot
                lease.id_slot = None
            return False
        lease.add_chunk(timings, slot, total)
        self._tps = rate_tps(timings, self._tps)
        # The first finds what it finds; each later one what the one before it left.
        if not (is_first or timings.cached_tokens >= before):
            return False
        lease.is_paused = True  # until the next chunk, which may have to wait for its turn
        await asyncio.sleep(pause_s(timings))
        return True

    async def _fits(self, count: int) -> bool:
        """Return whether the slots have room for a prompt, or the engine refuses it."""
        try:
            slots = await get_slots(self._lease.upstream, self._settings, _STEP_TIMEOUT_S)
        except UpstreamTimeout:
            return False
        return all(count < slot.n_ctx for slot in slots or () if slot.n_ctx)

    async def _tokens(self) -> list[int]:
        """Return the prompt's tokens; none where the engine does not say."""
        request = self._lease.request
        prompt = request.json.get("prompt")
        if request.kind is EndpointKind.CHAT:
            prompt = (await self._post("/apply-template", request.body) or {}).get("prompt")
        if isinstance(prompt, str):
            text = {"content": prompt, "add_special": True, "parse_special": True}
            prompt = (await self._post("/tokenize", orjson.dumps(text)) or {}).get("tokens")
        return prompt if _are_tokens(prompt) else []

    async def _post(self, path: str, body: bytes) -> Mapping[str, Any] | None:
        """Return the members of an answer; None where it has none."""
        lease = self._lease
        headers = CIMultiDict({"Content-Type": JSON, "X-Request-Id": lease.request.request_id})
        upstream_request = UpstreamRequest("POST", path, "", headers, body)
        try:
            page = await fetch(
                lease.upstream, upstream_request, self._settings, _STEP_TIMEOUT_S, _ANSWER_MAX_BYTES
            )
            members = orjson.loads(page.body)
        except UpstreamConnectFailed:  # the process may have crashed of this prompt
            raise
        except (UpstreamFailed, UpstreamTimeout, orjson.JSONDecodeError):
            return None
        lease.progress.bytes_received += len(page.body)
        return members if page.status == HTTPStatus.OK and isinstance(members, dict) else None


def _is_plain_text(request: ProxyRequest) -> bool:
    members = request.json
    if members.get("cache_prompt") is False or members.get("lora") or not is_single(members):
        return False
    if request.kind is EndpointKind.CHAT:
        return _has_text_only(members.get("messages"))
    prompt = members.get("prompt")
    return request.kind in _TEXTS and (isinstance(prompt, str) or _are_tokens(prompt))


def _has_text_only(messages: object) -> bool:
    """Whether no message has an image, audio or another part that is no text."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not (isinstance(part, dict) and part.get("type") == "text"):
                return False
    return True


def _are_tokens(tokens: object) -> TypeGuard[list[int]]:
    return isinstance(tokens, list) and all(type(one) is int for one in tokens)


def _chunk(tokens: Sequence[int], slot: int | None) -> bytes:
    members: dict[str, Any] = {
        "prompt": tokens,
        "n_predict": 0,
        "cache_prompt": True,
        "response_fields": ["id_slot", "timings"],
    }
    return orjson.dumps(members if slot is None else {**members, "id_slot": slot})
