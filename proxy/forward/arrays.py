"""A request with an array of prompts: one request for each, and their responses combined.

An engine computes the prompts of an array in as many slots as it has, and queues the rest inside:
other requests would wait behind all of them. As requests of their own each takes a lease. An array
that an engine refuses anyway is passed to it. Whole responses are held until all are complete,
streams are passed on as one stream. An error of one part is the response to the request.

Source: llama-server, build 10434, measured. An array with a number in it is one prompt in tokens;
the elements of any other are prompts: a string, an array with numbers, or an object. Embeddings
read `input`, else `content`; reranking reads `documents`, else `texts`. A text completion has the
timings of the first prompt; embeddings and reranking have the sum of `usage`; llama-server's own
endpoints return a list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import orjson
from multidict import CIMultiDict

from proxy.cache.prompt import read_prompt
from proxy.common.headers import JSON
from proxy.errors import BadRequest, UpstreamFailed
from proxy.forward.response import ResponseWriter
from proxy.request.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.sse import DONE, Splitter, data_of

# What the parts of one request may have in common, times how often it is sent.
_REPEATED_MAX_BYTES: Final = 64 * 1024**2
_EMBEDDING: Final = frozenset({"/embedding", "/embeddings", "/v1/embeddings"})
_RERANKING: Final = frozenset({"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"})


@dataclass(frozen=True, slots=True)
class PromptArray:
    """The request, and where its prompts are.

    Attributes:
        name: The member that holds the prompts.
        prompts: At least 2.
        choices: Completions of each of them, at least 1.
        is_ranked: The results are ordered by score.
    """

    request: ProxyRequest
    name: str
    prompts: Sequence[Any]
    choices: int
    is_ranked: bool

    @property
    def top_n(self) -> int:
        """How many of the ranked results are wanted."""
        value = self.request.json.get("top_n")
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and value is not None else len(self.prompts)

    def part(self, at: int) -> ProxyRequest:
        """Return the request for one of the prompts, from 0.

        Raises:
            BadRequest: Its other members are nested too deeply to be serialised again.
        """
        prompt, request = self.prompts[at], self.request
        # An array of one is read as the array was; a string is what every other request has.
        value = prompt if isinstance(prompt, str) and not self.is_ranked else [prompt]
        members = {**request.json, self.name: value}
        if self.is_ranked:
            members.pop("top_n", None)
        return replace(
            request,
            json=members,
            body=_encode_members(members),
            prompt=read_prompt(request.kind, request.model, members, request.owner),
            session=None,  # a conversation is in one slot
            is_let_in=at > 0,
        )


def array_of(request: ProxyRequest) -> PromptArray | None:
    """Return the prompts of a request, or None where it has not several.

    Raises:
        BadRequest: `top_n` is negative, which build 10434 notices at the end of the computation, or
            the other members are too large to be sent with each prompt.
    """
    name = _member(request)
    prompts = request.json.get(name) if name else None
    if name is None or not isinstance(prompts, list) or len(prompts) < 2:
        return None
    is_ranked = request.path in _RERANKING
    if not all(isinstance(prompt, str if is_ranked else str | list | dict) for prompt in prompts):
        return None
    array = PromptArray(request, name, prompts, request.slots, is_ranked)
    if array.top_n < 0:
        raise BadRequest("top_n must be 0 or more")
    _check_size(array)
    return array


def _check_size(array: PromptArray) -> None:
    most_bytes = _REPEATED_MAX_BYTES // len(array.prompts)
    if len(array.request.body) <= most_bytes:
        return
    beside = {name: value for name, value in array.request.json.items() if name != array.name}
    size_bytes = len(_encode_members(beside))
    if size_bytes > most_bytes:
        raise BadRequest(
            f"the members beside the {len(array.prompts)} prompts have {size_bytes} bytes, and at "
            f"most {most_bytes} are sent with each of so many; send fewer prompts at once"
        )


def _member(request: ProxyRequest) -> str | None:
    members = request.json
    if request.kind in {EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION}:
        return "prompt"
    if request.path in _EMBEDDING:
        return "input" if "input" in members else "content"
    if request.path in _RERANKING:
        return "documents" if "documents" in members else "texts"
    return None


def _encode_members(members: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(members)
    except TypeError as error:
        raise BadRequest(f"the body cannot be split into its prompts: {error}") from error


# The answers are held until the last is there.
GATHERED_MAX_BYTES: Final = 128 * 1024**2
_LISTS: Final = ("choices", "data", "results")
_SCORES: Final = ("relevance_score", "score")


class Gather:
    """The whole responses to the prompts of one request."""

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
        """Yield the combined response, piece by piece."""
        base = self._base[0]
        if base is None:
            yield b"["
            yield from self._listed()
            yield b"]"
            return
        shared = {**base, "usage": self._usage} if self._usage else base
        yield orjson.dumps(shared)[:-1] + (b',"%s":[' % self._list.encode())
        yield from self._listed()
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
                self._count(base.get("usage"))
        first = at * array.choices
        numbered = [_with_index(item, first + number) for number, item in enumerate(items)]
        self._base[at] = base if at == 0 else None
        self._items[at] = [orjson.dumps(item) for item in numbered]
        if array.is_ranked:
            self._rank(at, numbered)

    def _rank(self, at: int, items: list[dict[str, Any]]) -> None:
        for written, item in zip(self._items[at], items, strict=True):
            self._scores[written] = next(item[name] for name in _SCORES if name in item)

    def _count(self, usage: Mapping[str, int] | None) -> None:
        for name, tokens in (usage or {}).items():
            self._usage[name] = self._usage.get(name, 0) + tokens

    def _listed(self) -> Iterator[bytes]:
        """Yield the items with a comma before each but the first."""
        items = [item for at in range(len(self._array.prompts)) for item in self._items[at]]
        if self._array.is_ranked:
            items = sorted(items, key=lambda item: -self._scores[item])[: self._array.top_n]
        for number, item in enumerate(items):
            yield b"," + item if number else item


def _with_index(item: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an item with its number in the whole, where it has one at all."""
    return {**item, "index": number} if "index" in item else item


class Renumber:
    """The events of several streams as those of one stream.

    Attributes:
        is_done: Whether a stream ended with `[DONE]`, which is sent once, at the end of all.
    """

    def __init__(self, array: PromptArray) -> None:
        self._array = array
        self._shared: dict[str, Any] = {}
        self.is_done = False

    def event(self, at: int, event: bytes) -> bytes:
        """Return an event of the stream of one prompt as it is passed on; empty for none."""
        data = data_of(event)
        if data == DONE:
            self.is_done = True
            return b""
        try:
            piece = orjson.loads(data)
        except orjson.JSONDecodeError:
            return event
        if not isinstance(piece, dict):  # a `null`, which says nothing
            return b""
        return b"data: " + orjson.dumps(self._numbered(at * self._array.choices, piece)) + b"\n\n"

    def _numbered(self, first: int, piece: dict[str, Any]) -> dict[str, Any]:
        for item in (piece, piece.get("__verbose"), *_choices(piece)):
            if isinstance(item, dict) and isinstance(index := item.get("index"), int):
                item["index"] = first + index
        for name in ("id", "created"):  # the stream is one answer
            if name in piece:
                piece[name] = self._shared.setdefault(name, piece[name])
        return piece


def _choices(piece: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = piece.get("choices")
    return (
        [choice for choice in found if isinstance(choice, dict)] if isinstance(found, list) else []
    )


_LAST_EVENT: Final = b"data: " + DONE + b"\n\n"


class PartRefused(Exception):
    """An instance refused one of the prompts."""

    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.headers = headers
        self.body = body


class Part(ResponseWriter, Protocol):
    """One of them; `is_leased` is set once an instance has it."""

    is_leased: asyncio.Event

    def end(self) -> None:
        """Add its record to that of the request."""


class Parts(Protocol):
    def part(self, at: int, /) -> Part:
        """Return the writer for one prompt, from 0."""

    async def finish(self) -> None:
        """End the response, when all are complete."""


class _Part:
    def __init__(self, answer: ResponseWriter, at: int) -> None:
        self.record = answer.record.part()
        self.is_leased = asyncio.Event()
        self._answer = answer
        self._at = at

    def leased(self, lease: Lease) -> None:
        """Note that an instance has it now; the first sets the header fields of the response."""
        self.record.set_instance(
            lease.upstream.name, lease.expected_cached, lease.conversation_number
        )
        self.record.is_diverted = lease.is_diverted
        if self._answer.record.instance is None:
            self._answer.leased(lease)
        self.is_leased.set()

    def put(self, _chunk: bytes) -> bool:
        """Leave it to `write`."""
        return False

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self._answer.record.code = self.record.code
        raise PartRefused(status, headers, body)

    def end(self) -> None:
        self._answer.record.add(self.record)


class _WholePart(_Part):
    """One whole response, held here."""

    has_begun = False
    is_committed = False

    def __init__(self, answer: ResponseWriter, gather: Gather, at: int) -> None:
        super().__init__(answer, at)
        self._gather = gather
        self._body = bytearray()

    async def begin(self, status: int, _headers: CIMultiDict[str]) -> None:
        self.record.status = status
        self._body.clear()

    async def write(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > GATHERED_MAX_BYTES:
            raise UpstreamFailed("a response is too long; request a stream")

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)
        self._gather.add(self._at, bytes(self._body))
        self._body.clear()


class WholeParts:
    def __init__(self, answer: ResponseWriter, array: PromptArray) -> None:
        self._answer = answer
        self._gather = Gather(array)

    def part(self, at: int) -> Part:
        return _WholePart(self._answer, self._gather, at)

    async def finish(self) -> None:
        pieces = list(self._gather.pieces())
        length = str(sum(map(len, pieces)))
        headers = CIMultiDict({"Content-Type": JSON, "Content-Length": length})
        await self._answer.begin(200, headers)
        for piece in pieces:
            await self._answer.write(piece)
        await self._answer.finish()


class _StreamPart(_Part):
    def __init__(self, streams: StreamParts, answer: ResponseWriter, at: int) -> None:
        super().__init__(answer, at)
        self._streams = streams
        self._splitter = Splitter()
        self.is_committed = False

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self.is_committed = True
        self.record.status = status
        await self._streams.begin(status, headers)

    async def write(self, chunk: bytes) -> None:
        await self._streams.write(self._at, self._splitter.feed(chunk))

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)


class StreamParts:
    """Streams passed on as one: event by event, with one end."""

    def __init__(self, answer: ResponseWriter, array: PromptArray) -> None:
        self._answer = answer
        self._renumber = Renumber(array)
        self._turn = asyncio.Lock()

    def part(self, at: int) -> Part:
        return _StreamPart(self, self._answer, at)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin the response with the first of them."""
        async with self._turn:
            if not self._answer.is_committed:
                await self._answer.begin(status, headers)

    async def write(self, at: int, events: list[bytes]) -> None:
        passed = b"".join([self._renumber.event(at, event) for event in events])
        if passed:
            async with self._turn:
                await self._answer.write(passed)

    async def finish(self) -> None:
        await self._answer.finish(_LAST_EVENT if self._renumber.is_done else b"")


def parts_of(array: PromptArray, answer: ResponseWriter) -> Parts:
    kind = array.request.kind
    is_stream = array.request.is_stream and kind.generates
    return StreamParts(answer, array) if is_stream else WholeParts(answer, array)
