"""Computes long prompts in chunks beside running streams, and reads the progress of prompts.

An engine computes as much of a prompt in one pass as its batch holds, and all streams wait for that
pass. So on an instance that prefers pure decode, `PrefillChunks` first sends growing prefixes of a
long prompt, in tokens, to the slot that the request will use. After each chunk, the streams have
the engine to themselves for a quarter of the chunk's time. The request then finds its prefix in the
slot. In the same way, a request first computes the beginning that other instances need, which is
all before the user's first message, and has it saved before it goes on. If this fails, the request
is sent unchanged.

`PrefillFilter` reads a stream up to its first token. For clients that did not ask for progress it
removes progress and comments; a waiting client gets pings of our own. After the first token nothing
is inspected. A chat template may end in text that belongs to the answer (`<think>` and the start of
a thought). With progress, the engine sends that text in the first progress, and the role again with
each later one; without progress, it sends the role once, and that text with the first token. The
filter produces the second form for clients that did not ask for progress.

Source: llama-server, builds 10434 and 11434: `prompt_progress` {total, cache, processed, time_ms},
tokens; `processed` includes those of the cache. `n_predict` 0 computes a prompt and answers when it
is in the slot's cache; `/v1/chat/completions` tokenizes the text of `/apply-template`, with special
tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import takewhile
from typing import Any, Final, TypeGuard

import orjson
from multidict import CIMultiDict

from proxy.cache.prompt import BLOCK_TOKENS, has_text_only, is_system
from proxy.common.headers import JSON
from proxy.errors import UpstreamConnectFailed, UpstreamFailed, UpstreamTimeout
from proxy.http.api_formats import data_event
from proxy.request.chat_form import chat_form
from proxy.request.request import ProxyRequest, is_single
from proxy.router.lease import Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, UpstreamResponse, fetch
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.engine_state import get_slots
from proxy.upstream.http1 import InvalidEvent, Splitter, data_of, members_of
from proxy.upstream.upstream import Timings

# Prompt tokens: done, in all, found in the cache; the first number includes the last.
PrefillProgress = tuple[int, int, int]


def progress_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    progress = piece.get("prompt_progress")
    if not isinstance(progress, dict):
        return None
    figures = map(progress.get, ("processed", "total", "cache"))
    done, total, cached = [figure if isinstance(figure, int) else 0 for figure in figures]
    return done, total, cached


def prompt_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    """Return the prompt's token counts in Anthropic's first event, or None."""
    match piece:
        case {
            "type": "message_start",
            "message": {"usage": {"input_tokens": int(computed)} as usage},
        }:
            found = usage.get("cache_read_input_tokens")
            cached = found if isinstance(found, int) else 0
            return computed + cached, computed + cached, cached
    return None


def is_start(piece: Mapping[str, Any]) -> bool:
    """Return whether a piece only opens a response; it may precede any text."""
    if "type" in piece:
        return piece["type"] in ("response.created", "response.in_progress")
    match piece:
        case {"choices": [{"delta": {"role": _, "content": None}, "finish_reason": None}]}:
            return True
    return False


class PrefillFilter:
    """Filters one stream up to its first token.

    Attributes:
        latest: The latest progress, or None.
        is_over: Whether the first token has arrived; after that, `feed` must not be called.
    """

    def __init__(self, *, hides_progress: bool) -> None:
        self.latest: PrefillProgress | None = None
        self.is_over = False
        self._splitter = Splitter()
        self._hides_progress = hides_progress
        self._role = b""
        self._template_piece: Mapping[str, Any] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes, return the bytes for the client; raises InvalidEvent."""
        passed = b""
        self._splitter.add(chunk)
        while event := self._splitter.take_event():
            passed += self._filter_event(event)
            if self.is_over:
                return passed + self._splitter.take_rest()
        return passed

    def _filter_event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {") and not data_of(event):
            return b""
        piece = members_of(event) or {}
        if progress := progress_of(piece):
            self.latest = progress
            if not self._hides_progress:
                return event
            if _text_of(piece):
                self._template_piece = piece
            return b""
        if not is_start(piece):
            self.is_over = True
            self.latest = prompt_of(piece) or self.latest
            begun = self._template_piece
            return self._role + (_join_first_token(begun, event, piece) if begun else event)
        if self._hides_progress:  # only the next piece tells whether this is the last role
            self._role, event = event, b""
        return event


def _join_first_token(begun: Mapping[str, Any], event: bytes, piece: Mapping[str, Any]) -> bytes:
    """Return the template's text, which is in the piece `begun`, followed by the first token."""
    before, token = _text_of(begun), _text_of(piece)
    if before and token and before[0] == token[0]:
        choice = piece["choices"][0]
        delta = {**choice["delta"], token[0]: before[1] + token[1]}
        return data_event({**piece, "choices": [{**choice, "delta": delta}]})
    members = {key: value for key, value in begun.items() if key != "prompt_progress"}
    return data_event(members) + event


def _text_of(piece: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the member of a chat's delta that has text, and the text; None if none has."""
    match piece:
        case {"choices": [{"delta": {"content": str(text)}}]} if text:
            return "content", text
        case {"choices": [{"delta": {"reasoning_content": str(text)}}]} if text:
            return "reasoning_content", text
    return None


# Target duration of a pass with a chunk; running streams pause this long.
_PASS_S: Final = 0.15
# With 64 tokens, which take a CPU 0.3 s after 2 000 tokens, pauses were not even halved. Chunks
# above the maximum exceed a micro-batch.
_MIN_TOKENS: Final = 32
_MAX_TOKENS: Final = 512
_WORTH_CHUNKS: Final = 2
_PAUSE_MAX_S: Final = 1.0
# The streams also get one token from each pass with a chunk.
_PAUSE_SHARE: Final = 0.25


def chunk_tokens(prefill_tps: float) -> int:
    """Return the size of a chunk, in tokens, at this speed of prefill."""
    return min(_MAX_TOKENS, max(_MIN_TOKENS, round(prefill_tps * _PASS_S)))


def is_worth(new_tokens: int, prefill_tps: float) -> bool:
    """Return whether chunks help: a shorter prompt takes only short passes anyway."""
    return new_tokens > _WORTH_CHUNKS * chunk_tokens(prefill_tps)


def pause_s(chunk: Timings) -> float:
    """Return how long the streams get the engine to themselves: a quarter of the chunk's time."""
    return min(_PAUSE_MAX_S, _PAUSE_SHARE * chunk.prompt_ms / 1000)


# A token has about 4 bytes of English text, and rarely four times as many. If fewer tokens come
# before the user's message, the template puts the beginning elsewhere.
_FEWER_TOKENS: Final = 4
# A chunk takes the current pass and its own; with another long prompt, a few more.
_STEP_TIMEOUT_S: Final = 20.0
_ANSWER_MAX_BYTES: Final = 32 * 1024**2
# Where the engine counts the tokens of requests that it translates.
_COUNT_PAGES: Final = {
    EndpointKind.MESSAGES: "/v1/messages/count_tokens",
    EndpointKind.RESPONSES: "/v1/responses/input_tokens",
}
_TEXTS: Final = frozenset({EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION})


def has_chunks(lease: Lease) -> bool:
    """Return whether to compute a prompt in chunks: long text, while streams run.

    Recurrent models are excluded: a chunk shorter than the slot's content would discard its state.
    """
    upstream, tps = lease.upstream, lease.instance.rates.prefill_tps
    prefers = upstream.prefer_pure_decode and not upstream.resumable_prompts
    may_name = prefers and lease.slot is not None and upstream.node is None
    may_name = may_name and not lease.is_cache_off
    is_long = may_name and is_worth(lease.backlog_tokens, tps) and lease.instance.decoding > 0
    return is_long and _is_plain_text(lease.request)


class PrefillChunks:
    """Computes the prompt of one request, except for the part that the request itself computes."""

    def __init__(self, lease: Lease, router: Router, settings: ProxySettings) -> None:
        self._lease = lease
        self._router = router
        self._settings = settings
        self._tps = lease.instance.rates.prefill_tps

    async def compute(self) -> None:
        """Compute the prompt in chunks while other requests decode, and name its slot.

        Raises UpstreamConnectFailed: the instance refused or closed a connection.
        """
        tokens = await self._tokens()
        if not (tokens and await self._fits(len(tokens))):
            return
        done = self._lease.expected_cached
        try:
            while self._lease.instance.decoding:
                end = done + chunk_tokens(self._tps)
                if end >= len(tokens):  # the request computes the rest itself
                    return
                async with self._lease.instance.chunk_turn:  # two chunks would make one long pass
                    if not await self._compute_to(tokens[:end], len(tokens), done):
                        return
                done = end
        finally:
            self._lease.is_paused = False

    async def _compute_to(self, tokens: Sequence[int], total: int, before: int) -> bool:
        """Compute a prefix, then leave the engine to the streams; return whether to continue."""
        lease = self._lease
        lease.is_paused = False
        self._router.note_chunk(lease)
        answer = await self._post("/completion", self._chunk_body(tokens)) or {}
        timings, slot = Timings.read(answer.get("timings")), answer.get("id_slot")
        is_first = lease.chunked is None
        if timings is None or not isinstance(slot, int):
            if not is_first:  # another request may use the slot
                lease.id_slot = None
            return False
        lease.add_chunk(timings, slot, total)
        if timings.prompt_tokens and timings.prompt_ms:
            self._tps = timings.prompt_tokens / timings.prompt_ms * 1000
        # Each chunk after the first must find the tokens of the one before it in the cache.
        if not (is_first or timings.cached_tokens >= before):
            return False
        lease.is_paused = True  # until the next chunk, which may have to wait for its turn
        await asyncio.sleep(pause_s(timings))
        return True

    def _chunk_body(self, tokens: Sequence[int], **more: object) -> bytes:
        members: dict[str, Any] = {
            "prompt": tokens,
            "n_predict": 0,
            "cache_prompt": True,
            "response_fields": ["id_slot", "timings"],
            **more,
        }
        if self._lease.id_slot is not None:
            members["id_slot"] = self._lease.id_slot
        return orjson.dumps(members)

    async def compute_beginning(self) -> None:
        """Compute the prompt's beginning, and have it saved for other instances.

        Raises UpstreamConnectFailed: the instance refused or closed a connection.
        """
        lease, is_saved = self._lease, False
        request = lease.request
        try:
            chat = chat_form(request.kind, request.json)
            if chat and _is_alone(request.json) and has_text_only(chat["messages"]):
                tokens = await self._chat_tokens(chat)
                end = await self._beginning_end(chat, tokens)
                if end and await self._compute_at_once(tokens[:end], len(tokens)):
                    is_saved = await self._router.save_beginning(lease, end)
                    await self._router.aim(lease)
        finally:
            lease.is_paused = False
            self._router.note_beginning(lease, is_saved=is_saved)

    async def _beginning_end(self, chat: Mapping[str, Any], tokens: Sequence[int]) -> int:
        """Return the number of tokens before the user's first message; 0 if unknown.

        Of a branch, return all tokens, but the last if a slot cannot be cut back by that.
        """
        if self._lease.request.is_branch:
            return len(tokens) - self._lease.upstream.is_all_or_nothing
        lease, messages = self._lease, chat["messages"]
        own = next((message for message in messages if not is_system(message)), None)
        if own is None:
            return 0
        if count_page := _COUNT_PAGES.get(lease.request.kind):
            # The engine translates this request. Is its result this chat?
            counted = await self._post(count_page, lease.request.body) or {}
            if counted.get("input_tokens") != len(tokens):
                return 0
        before = messages[: messages.index(own)]
        other = {**chat, "messages": [*before, {"role": own.get("role"), "content": "?"}]}
        pairs = zip(tokens, await self._chat_tokens(other), strict=False)
        end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return end if _FEWER_TOKENS * end >= lease.beginning_blocks * BLOCK_TOKENS else 0

    async def _compute_at_once(self, tokens: Sequence[int], total: int) -> bool:
        """Compute a prefix with reports of its progress; return whether the slot has all of it."""
        lease = self._lease
        self._router.note_chunk(lease)
        lease.is_reported = False
        body = self._chunk_body(tokens, stream=True, return_progress=True)
        sent = self._request("/completion", body)
        splitter = Splitter()
        piece: Mapping[str, Any] = {}
        try:
            async with UpstreamResponse(lease.upstream, sent, self._settings) as response:
                while chunk := await response.read():
                    lease.progress.bytes_received += len(chunk)
                    for event in splitter.feed(chunk):
                        piece = members_of(event) or piece
                        if progress := progress_of(piece):
                            done, _, cached = progress
                            lease.progress.set_prompt(done, total, cached)
        except UpstreamConnectFailed:  # this prompt may have crashed the process
            raise
        except (UpstreamFailed, UpstreamTimeout, InvalidEvent):
            return False
        timings, slot = Timings.read(piece.get("timings")), piece.get("id_slot")
        if timings is None or not isinstance(slot, int):
            return False
        lease.add_chunk(timings, slot, total)
        lease.is_paused = True
        return timings.cached_tokens + timings.prompt_tokens == len(tokens)

    async def _fits(self, count: int) -> bool:
        """Return whether all slots have room for a prompt; else the engine refuses the request."""
        try:
            slots = await get_slots(self._lease.upstream, self._settings, _STEP_TIMEOUT_S)
        except UpstreamTimeout:
            return False
        return all(count < slot.n_ctx for slot in slots or () if slot.n_ctx)

    async def _chat_tokens(self, chat: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a chat's prompt; none if the engine fails."""
        rendered = await self._post("/apply-template", orjson.dumps(chat)) or {}
        return await self._text_tokens(rendered.get("prompt"))

    async def _tokens(self) -> list[int]:
        """Return the tokens of the prompt; none if the engine fails."""
        request = self._lease.request
        prompt = request.json.get("prompt")
        if request.kind is EndpointKind.CHAT:
            prompt = (await self._post("/apply-template", request.body) or {}).get("prompt")
        return await self._text_tokens(prompt)

    async def _text_tokens(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            text = {"content": prompt, "add_special": True, "parse_special": True}
            prompt = (await self._post("/tokenize", orjson.dumps(text)) or {}).get("tokens")
        return prompt if _are_tokens(prompt) else []

    async def _post(self, path: str, body: bytes) -> Mapping[str, Any] | None:
        """Return the members of a successful answer, else None."""
        lease = self._lease
        upstream_request = self._request(path, body)
        try:
            page = await fetch(
                lease.upstream, upstream_request, self._settings, _STEP_TIMEOUT_S, _ANSWER_MAX_BYTES
            )
            members = orjson.loads(page.body)
        except UpstreamConnectFailed:  # this prompt may have crashed the process
            raise
        except (UpstreamFailed, UpstreamTimeout, orjson.JSONDecodeError):
            return None
        lease.progress.bytes_received += len(page.body)
        return members if page.status == HTTPStatus.OK and isinstance(members, dict) else None

    def _request(self, path: str, body: bytes) -> UpstreamRequest:
        request_id = self._lease.request.request_id
        headers = CIMultiDict({"Content-Type": JSON})
        return UpstreamRequest("POST", path, "", headers, body, request_id)


def _is_plain_text(request: ProxyRequest) -> bool:
    members = request.json
    if not _is_alone(members):
        return False
    if request.kind is EndpointKind.CHAT:
        return has_text_only(members.get("messages"))
    prompt = members.get("prompt")
    return request.kind in _TEXTS and (isinstance(prompt, str) or _are_tokens(prompt))


def _is_alone(members: Mapping[str, Any]) -> bool:
    """Return whether a request has one prompt, and may find it in the cache of the base model."""
    is_off = members.get("cache_prompt") is False or members.get("lora")
    return not is_off and is_single(members)


def _are_tokens(tokens: object) -> TypeGuard[list[int]]:
    return isinstance(tokens, list) and all(type(token) is int for token in tokens)
