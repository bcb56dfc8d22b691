"""Splits a request with an array of prompts into one request for each, and joins the responses.

An engine computes the prompts of an array in all of its slots, and queues the rest internally, so
other requests would wait behind all of them. Here each prompt is a request with a lease of its own.
An array that an engine refuses anyway is passed to it. Whole responses are held until all are
complete; streams are passed on as one stream. If one part fails, its error is the response.

Source: llama-server, build 10434, measured. An array that contains a number is one prompt in
tokens; the elements of any other array are prompts: a string, an array with numbers, or an object.
Embeddings read `input`, else `content`; reranking reads `documents`, else `texts`. A text
completion has the timings of the first prompt; embeddings and reranking have the sum of `usage`;
llama-server's own endpoints return a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.cache.prompt import read_prompt
from proxy.common.headers import JSON
from proxy.errors import BadRequest, UpstreamFailed
from proxy.forward.response import Discarded, EventTransform, Response, StreamTransform
from proxy.http.api_formats import data_event
from proxy.request.request import ProxyRequest, encode_members
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE, data_of

# Limit of the members that all parts share, times the number of parts.
_REPEATED_MAX_BYTES: Final = 64 * 1024**2
_EMBEDDING: Final = frozenset({"/embedding", "/embeddings", "/v1/embeddings"})
_RERANKING: Final = frozenset({"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"})


@dataclass(frozen=True, slots=True)
class PromptArray:
    request: ProxyRequest
    name: str  # the member that holds the prompts
    prompts: Sequence[Any]  # at least 2
    choices: int  # completions of each prompt, at least 1
    is_ranked: bool  # whether the results are ordered by score
    top_n: int  # the number of results that are shown

    def part(self, at: int) -> ProxyRequest:
        """Return the request for the prompt at this index.

        Raises BadRequest: its other members are nested too deeply to be serialised again.
        """
        prompt, request = self.prompts[at], self.request
        # The engine reads an array of one prompt like the whole array; a string is the usual form.
        value = prompt if isinstance(prompt, str) and not self.is_ranked else [prompt]
        members = {**request.json, self.name: value}
        if self.is_ranked:
            members.pop("top_n", None)
        return replace(
            request,
            json=members,
            body=encode_members(members),
            prompt=read_prompt(request.kind, request.model, members, request.owner),
            session=None,  # a conversation is in one slot
            is_let_in=at > 0,
        )


def array_of(request: ProxyRequest) -> PromptArray | None:
    """Return the prompts of a request; None unless it has several.

    Raises BadRequest: `top_n` is negative, which build 10434 notices only after the computation, or
    the other members are too large to be sent with each prompt.
    """
    name = _prompts_member(request)
    prompts = request.json.get(name) if name else None
    if name is None or not isinstance(prompts, list) or len(prompts) < 2:
        return None
    is_ranked = request.path in _RERANKING
    if not all(isinstance(prompt, str if is_ranked else str | list | dict) for prompt in prompts):
        return None
    given = request.json.get("top_n")
    top_n = given if type(given) is int else len(prompts)
    if top_n < 0:
        raise BadRequest("top_n must be 0 or more")
    most_bytes = _REPEATED_MAX_BYTES // len(prompts)
    if len(request.body) > most_bytes:
        beside = {member: value for member, value in request.json.items() if member != name}
        if (size_bytes := len(encode_members(beside))) > most_bytes:
            raise BadRequest(
                f"the members beside the {len(prompts)} prompts have {size_bytes} bytes, and at "
                f"most {most_bytes} are sent with each of so many; send fewer prompts at once"
            )
    return PromptArray(request, name, prompts, request.slots, is_ranked, top_n)


def _prompts_member(request: ProxyRequest) -> str | None:
    members = request.json
    if request.kind in {EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION}:
        return "prompt"
    if request.path in _EMBEDDING:
        return "input" if "input" in members else "content"
    if request.path in _RERANKING:
        return "documents" if "documents" in members else "texts"
    return None


# Limit of all answers together, which are held until the last one is complete.
GATHERED_MAX_BYTES: Final = 128 * 1024**2
_LISTS: Final = ("choices", "data", "results")
_SCORES: Final = ("relevance_score", "score")


class Gather:
    """Joins the whole responses to the prompts of one request."""

    def __init__(self, array: PromptArray) -> None:
        self._array = array
        self._base: dict[int, dict[str, Any] | None] = {}
        self._items: dict[int, list[bytes]] = {}
        self._scores: dict[bytes, float] = {}
        self._usage: dict[str, int] = {}
        self._size_bytes = 0
        self._list = ""

    def add(self, at: int, body: bytes) -> None:
        """Take the response to one prompt; raises UpstreamFailed."""
        self._size_bytes += len(body)
        if self._size_bytes > GATHERED_MAX_BYTES:
            limit = f"{GATHERED_MAX_BYTES} bytes"
            raise UpstreamFailed(
                f"the responses are larger than {limit}; send fewer prompts at once"
            )
        try:
            self._take(at, orjson.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(
                f"the response to prompt {at} has another format: {error!r}"
            ) from error

    def pieces(self) -> Iterator[bytes]:
        base = self._base[0]
        if base is None:
            yield b"["
            yield from self._join_items()
            yield b"]"
            return
        shared = {**base, "usage": self._usage} if self._usage else base
        yield orjson.dumps(shared)[:-1] + (b',"%s":[' % self._list.encode())
        yield from self._join_items()
        yield b"]}"

    def _take(self, at: int, answer: Any) -> None:
        array = self._array
        is_bare = array.request.kind is EndpointKind.LLAMA_COMPLETION and isinstance(answer, dict)
        items = [answer] if is_bare else answer
        base = None
        if isinstance(items, dict):
            self._list = next(name for name in _LISTS if name in items)
            base = {name: value for name, value in items.items() if name != self._list}
            items = items[self._list]
            if array.request.kind is EndpointKind.EMBED_OR_RERANK:
                for name, tokens in (base.get("usage") or {}).items():
                    self._usage[name] = self._usage.get(name, 0) + tokens
        self._base[at] = base if at == 0 else None
        self._items[at] = []
        for index, item in enumerate(items, at * array.choices):
            numbered = {**item, "index": index} if "index" in item else item
            encoded = orjson.dumps(numbered)
            self._items[at].append(encoded)
            if array.is_ranked:
                self._scores[encoded] = next(item[name] for name in _SCORES if name in item)

    def _join_items(self) -> Iterator[bytes]:
        items = [item for at in range(len(self._array.prompts)) for item in self._items[at]]
        if self._array.is_ranked:
            items = sorted(items, key=lambda item: -self._scores[item])[: self._array.top_n]
        for number, item in enumerate(items):
            yield b"," + item if number else item


class PartRefused(Exception):
    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.headers = headers
        self.body = body


class _GatheredPart(StreamTransform):
    """Gives the whole response to one prompt to `gather`."""

    holds_streams = True
    max_bytes = GATHERED_MAX_BYTES

    def __init__(self, gather: Gather, at: int) -> None:
        self._gather = gather
        self._at = at

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of any status)
        self._gather.add(self._at, body)
        raise Discarded


class _RenumberedPart(EventTransform):
    """Renumbers the events of one prompt's stream for the common stream.

    Args:
        shared: The members that all events have in common.
        done: Gets the index of the prompt at `[DONE]`, which is sent once, after all streams.
    """

    holds_whole = False

    def __init__(self, array: PromptArray, at: int, shared: dict[str, Any], done: set[int]) -> None:
        super().__init__()
        self._at = at
        self._first = at * array.choices
        self._shared = shared
        self._done = done

    def event(self, event: bytes) -> bytes:
        data = data_of(event)
        if data == DONE:
            self._done.add(self._at)
            return b""
        try:
            piece = orjson.loads(data)
        except orjson.JSONDecodeError:
            return event
        if not isinstance(piece, dict):  # a `null` without meaning
            return b""
        choices = piece.get("choices")
        items = choices if isinstance(choices, list) else []
        for item in (piece, piece.get("__verbose"), *items):
            if isinstance(item, dict) and isinstance(index := item.get("index"), int):
                item["index"] = self._first + index
        for name in ("id", "created"):  # the stream is one answer
            if name in piece:
                piece[name] = self._shared.setdefault(name, piece[name])
        return data_event(piece)


class _Part(Response):
    """Takes the response to one prompt; `is_leased` is set once an instance has the prompt."""

    def __init__(self, answer: Response, transform: StreamTransform, turn: asyncio.Lock) -> None:
        super().__init__(answer.record.part(), answer.api, transform)
        self.is_leased = asyncio.Event()
        self._answer = answer
        self._turn = turn

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    def note_lease(self, lease: Lease) -> None:
        """Note that an instance has the prompt; the first sets the response's header fields."""
        super().note_lease(lease)
        if self._answer.record.instance is None:
            self._answer.note_lease(lease)
        self.is_leased.set()

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self.record.status = status
        await super().begin(status, headers)

    async def _send_header(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin the response when the first stream begins."""
        self.is_committed = True
        async with self._turn:
            if not self._answer.is_committed:
                await self._answer.begin(status, headers)

    async def _send(self, chunk: bytes) -> None:
        async with self._turn:
            await self._answer.write(chunk)

    async def _send_last(self, last: bytes) -> None:
        if last:
            await self._send(last)

    async def _send_error(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self._answer.record.code = self.record.code
        raise PartRefused(status, headers, body)


async def forward_parts(
    array: PromptArray,
    client_response: Response,
    forward: Callable[[ProxyRequest, Response], Awaitable[None]],
) -> None:
    """Answer the prompts of an array, as many at once as slots are leased for them.

    One prompt at a time waits for a slot, so the request has one place in the queue. Whole
    responses are joined, and streams are passed on as one stream.
    """
    is_stream = array.request.is_stream and array.request.kind.generates
    gather, turn = Gather(array), asyncio.Lock()
    shared: dict[str, Any] = {}
    done: set[int] = set()

    def new_part(at: int) -> _Part:
        renumbered = _RenumberedPart(array, at, shared, done) if is_stream else None
        return _Part(client_response, renumbered or _GatheredPart(gather, at), turn)

    async def forward_part(request: ProxyRequest, part: _Part) -> None:
        try:
            await forward(request, part)
            client_response.record.add(part.record)
        finally:
            part.is_leased.set()

    if is_stream:
        client_response.start_pings()
    try:
        async with asyncio.TaskGroup() as group:
            for at in range(len(array.prompts)):
                part = new_part(at)
                group.create_task(forward_part(array.part(at), part))
                await part.is_leased.wait()
        if is_stream:
            await client_response.finish(b"data: [DONE]\n\n" if done else b"")
        else:
            await _send_whole(list(gather.pieces()), client_response)
    except BaseExceptionGroup as failed:
        if not isinstance(refused := failed.exceptions[0], PartRefused):
            raise refused from None  # without the task group around it
        await client_response.refuse(refused.status, refused.headers, refused.body)
    finally:
        await client_response.cancel_pings()


async def _send_whole(pieces: Sequence[bytes], client_response: Response) -> None:
    length = str(sum(map(len, pieces)))
    headers = CIMultiDict({"Content-Type": JSON, "Content-Length": length})
    await client_response.begin(HTTPStatus.OK, headers)
    for piece in pieces:
        await client_response.write(piece)
    await client_response.finish()
