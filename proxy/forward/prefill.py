"""Prompts before the first token: long ones in chunks beside streams, and their progress.

An engine computes as much of a prompt in one pass as its batch holds, and all streams wait for that
pass. So on an instance that prefers pure decode, `PrefillChunks` first sends growing prefixes of a
long prompt, in tokens, to the slot that the request will use, and after each leaves the engine to
the streams for a quarter as long. The request then finds its prefix in the slot. If anything fails
here, the request is sent as it is.

`PrefillFilter` reads a stream up to its first token. It removes progress and comments for clients
that did not ask for progress: a client that waits gets comments of our own. After the first token
nothing is inspected. A chat template may end in text that belongs to the answer (`<think>` and the
start of a thought). With progress, the engine sends that text in the first progress, and the role
again with each later one; without, it sends the role once, and that text with the first token. A
client that did not ask for progress gets the second.

Source: llama-server, builds 10434 and 11434: `prompt_progress` {total, cache, processed, time_ms},
tokens; `processed` includes those of the cache. `n_predict` 0 computes a prompt and answers when it
is in the slot's cache; `/v1/chat/completions` tokenizes what `/apply-template` returns, with
special tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, TypeGuard

import orjson
from multidict import CIMultiDict

from proxy.common.headers import JSON
from proxy.errors import UpstreamConnectFailed, UpstreamFailed, UpstreamTimeout
from proxy.request.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, fetch
from proxy.upstream.endpoint_kinds import EndpointKind, is_single
from proxy.upstream.engine_state import get_slots
from proxy.upstream.sse import Splitter, data_of, members_of
from proxy.upstream.timings import Timings


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens; `done` includes `cached`."""

    done: int
    total: int
    cached: int


def progress_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    """Return the progress in a piece, or None."""
    progress = piece.get("prompt_progress")
    if not isinstance(progress, dict):
        return None
    figures = [progress.get(name) for name in ("processed", "total", "cache")]
    done, total, cached = (figure if isinstance(figure, int) else 0 for figure in figures)
    return PrefillProgress(done, total, cached)


def prompt_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    """Return the figures of the prompt in Anthropic's first event, or None."""
    match piece:
        case {
            "type": "message_start",
            "message": {"usage": {"input_tokens": int(computed)} as usage},
        }:
            cached = usage.get("cache_read_input_tokens")
            found = cached if isinstance(cached, int) else 0
            return PrefillProgress(computed + found, computed + found, found)
    return None


def is_start(piece: Mapping[str, Any]) -> bool:
    """Return whether a piece only opens a response, which may come before any text."""
    match piece:
        case {"choices": [{"delta": {"role": _, "content": None}, "finish_reason": None}]}:
            return True
        case {"type": "response.created" | "response.in_progress"}:
            return True
    return False


class PrefillFilter:
    """One stream up to its first token.

    Attributes:
        latest: The last progress, or None.
        is_over: Whether the first token has arrived; then no more bytes are to be fed.
    """

    def __init__(self, *, hides_progress: bool) -> None:
        self.latest: PrefillProgress | None = None
        self.is_over = False
        self._splitter = Splitter()
        self._hides_progress = hides_progress
        self._role = b""
        self._begun: Mapping[str, Any] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes, return those for the client; raises InvalidEvent."""
        kept = b"".join([self._kept(event) for event in self._splitter.feed(chunk)])
        return kept + self._splitter.take_rest() if self.is_over else kept

    def _kept(self, event: bytes) -> bytes:
        if self.is_over:
            return event
        if not data_of(event):
            return b""
        piece = members_of(event) or {}
        if progress := progress_of(piece):
            self.latest = progress
            return self._without_progress(event, piece)
        if not is_start(piece):
            self.is_over = True
            self.latest = prompt_of(piece) or self.latest
            return self._role + self._joined(event, piece)
        if self._hides_progress:  # if it is the last one is known at the next piece
            self._role, event = event, b""
        return event

    def _without_progress(self, event: bytes, piece: Mapping[str, Any]) -> bytes:
        if not self._hides_progress:
            return event
        if _text_of(piece):
            self._begun = piece
        return b""

    def _joined(self, event: bytes, piece: Mapping[str, Any]) -> bytes:
        """Return the first token behind the template's text."""
        if self._begun is None:
            return event
        begun, text = _text_of(self._begun), _text_of(piece)
        if begun and text and begun[0] == text[0]:
            return _with_text(piece, text[0], begun[1] + text[1])
        members = {key: value for key, value in self._begun.items() if key != "prompt_progress"}
        return _event(members) + event


def _text_of(piece: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the member of a chat's delta that has text, and the text; None where none has."""
    match piece:
        case {"choices": [{"delta": {"content": str(text)}}]} if text:
            return "content", text
        case {"choices": [{"delta": {"reasoning_content": str(text)}}]} if text:
            return "reasoning_content", text
    return None


def _with_text(piece: Mapping[str, Any], name: str, text: str) -> bytes:
    choice = piece["choices"][0]
    delta = {**choice["delta"], name: text}
    return _event({**piece, "choices": [{**choice, "delta": delta}]})


def _event(piece: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(piece) + b"\n\n"


# A pass with a chunk takes about so long, which is what a running stream pauses for.
_PASS_S: Final = 0.15
# With 64, which a CPU computes in 0.3 s behind 2 000 tokens, pauses were no half of those without;
# larger ones exceed a micro-batch.
_MIN_TOKENS: Final = 32
_MAX_TOKENS: Final = 512
_WORTH_CHUNKS: Final = 2
_PAUSE_MAX_S: Final = 1.0
# The streams also get a token of each pass with a chunk.
_PAUSE_SHARE: Final = 0.25


def chunk_tokens(prefill_tps: float) -> int:
    """Return the tokens of one chunk at a rate of prefill."""
    return min(_MAX_TOKENS, max(_MIN_TOKENS, round(prefill_tps * _PASS_S)))


def is_worth(new_tokens: int, prefill_tps: float) -> bool:
    """Return whether so many tokens are more than a request computes in short passes anyway."""
    return new_tokens > _WORTH_CHUNKS * chunk_tokens(prefill_tps)


def next_end(done: int, total: int, prefill_tps: float) -> int | None:
    """Return where the next chunk of a prompt ends; None where the rest is one chunk at most."""
    end = done + chunk_tokens(prefill_tps)
    return end if end < total else None


def rate_tps(chunk: Timings, before_tps: float) -> float:
    """Return the rate at which a chunk was computed; that before where it does not say."""
    if not (chunk.prompt_tokens and chunk.prompt_ms):
        return before_tps
    return chunk.prompt_tokens / chunk.prompt_ms * 1000


def pause_s(chunk: Timings) -> float:
    """Return how long the streams then have the engine for themselves: a quarter as long."""
    return min(_PAUSE_MAX_S, _PAUSE_SHARE * chunk.prompt_ms / 1000)


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
    return isinstance(tokens, list) and all(type(token) is int for token in tokens)


def _chunk(tokens: Sequence[int], slot: int | None) -> bytes:
    members: dict[str, Any] = {
        "prompt": tokens,
        "n_predict": 0,
        "cache_prompt": True,
        "response_fields": ["id_slot", "timings"],
    }
    return orjson.dumps(members if slot is None else {**members, "id_slot": slot})
