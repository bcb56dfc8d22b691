"""Splits a request for several answers into smaller ones, and joins the responses.

An engine computes the prompts of an array in all of its slots, and queues the rest internally, so
other requests would wait behind all of them. Here each prompt is a request with its own lease. An
array that an engine refuses anyway is passed to it.

Several answers to one prompt that fit into an engine are its own work: it computes the prompt once.
More answers are split. Requests for one answer each share a slot file of the whole prompt; if that
is impossible, each engine gets as many answers as it has slots.

Whole responses are held until all are complete; streams are passed on as one stream. If one part
fails, its error is the response.

Source: llama-server, build 10434, measured. An array that contains a number is one prompt in
tokens; the elements of any other array are prompts: a string, an array with numbers, or an object.
Embeddings read `input`, else `content`; reranking reads `documents`, else `texts`. A text
completion has the timings of the first prompt; embeddings and reranking have the sum of `usage`;
llama-server's own endpoints return a list. With `n`, the engine copies the slot of the first answer
into others, adds 1 to the seed for each, and refuses more answers than it has slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.cache.prompt import has_text_only, read_prompt
from proxy.cache.shared_prefixes import BEGINNING_BLOCKS_MIN
from proxy.common.headers import JSON
from proxy.errors import BadRequest, UpstreamFailed
from proxy.forward.response import Discarded, EventTransform, Response, StreamTransform
from proxy.http.api_formats import data_event
from proxy.request.request import ProxyRequest, encode_members
from proxy.router.lease import Lease, RoutingTarget
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

    @property
    def count(self) -> int:
        return len(self.prompts)

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


# The engine takes this seed as random. Source: llama.h, LLAMA_DEFAULT_SEED.
_RANDOM_SEED: Final = 2**32 - 1
_FORKED: Final = frozenset(
    {EndpointKind.CHAT, EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION}
)
_ANSWERS: Final = ("n", "n_cmpl")


class Fork:
    """A request for more answers to one prompt than an instance has slots.

    `choices` are the answers of each part, at least 1; the last part may have fewer.
    """

    def __init__(self, request: ProxyRequest, choices: int) -> None:
        self.request = request
        self.choices = choices
        self.count = -(-request.slots // choices)

    def part(self, at: int) -> ProxyRequest:
        """Return the request for the answers from `at * choices` on.

        Raises BadRequest: its members are nested too deeply to be serialised again.
        """
        request, first = self.request, at * self.choices
        answers = min(self.choices, request.slots - first)
        members = {name: value for name, value in request.json.items() if name not in _ANSWERS}
        if answers > 1:
            members["n"] = answers
        seed = members.get("seed")
        if type(seed) is int and 0 <= seed < _RANDOM_SEED:
            members["seed"] = (seed + first) % _RANDOM_SEED
        return replace(
            request,
            json=members,
            body=encode_members(members),
            slots=answers,
            session=None if at else request.session,  # a conversation is in one slot
            is_let_in=request.is_let_in or at > 0,
            is_branch=answers == 1,
        )


def fork_of(request: ProxyRequest, instances: Sequence[RoutingTarget]) -> Fork | None:
    """Return how to split a request for more answers than any of `instances` has slots.

    So is a request whose calls are checked, because each answer is checked separately. None if one
    instance has enough slots, or if an engine refuses the request anyway.

    Raises BadRequest: the request is too large to be sent for each answer.
    """
    able = [instance.upstream for instance in instances if instance.may_take(request)]
    slots = max((upstream.slots for upstream in able), default=0)
    is_checked = request.call_retries is not None and "tools" in request.json
    if request.kind not in _FORKED or not slots or (slots >= request.slots and not is_checked):
        return None
    given = [value for name in _ANSWERS if (value := request.json.get(name)) is not None]
    if any(type(value) is not int for value in given) or request.slots != max(given):
        return None
    is_short = request.prompt is None or len(request.prompt.blocks) < BEGINNING_BLOCKS_MIN
    is_chat = request.kind is EndpointKind.CHAT and has_text_only(request.json.get("messages"))
    is_shared = is_chat and any(upstream.saves_beginnings for upstream in able)
    fork = Fork(request, 1 if is_short or is_shared or is_checked else slots)
    if (size_bytes := fork.count * len(request.body)) > _REPEATED_MAX_BYTES:
        raise BadRequest(
            f"{request.slots} answers need {fork.count} requests with {size_bytes} bytes in all, "
            f"more than {_REPEATED_MAX_BYTES}; ask for fewer answers at once"
        )
    return fork


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
    """Joins the whole responses to the parts of one request."""

    def __init__(self, array: PromptArray | Fork) -> None:
        self._array = array
        self._base: dict[int, dict[str, Any] | None] = {}
        self._items: dict[int, list[bytes]] = {}
        self._scores: dict[bytes, float] = {}
        self._usage: dict[str, int] = {}
        self._usages: dict[int, Mapping[str, Any]] = {}  # of the parts of a fork
        self._size_bytes = 0
        self._list = ""

    def add(self, at: int, body: bytes) -> None:
        """Take the response to one part; raises UpstreamFailed."""
        self._size_bytes += len(body)
        if self._size_bytes > GATHERED_MAX_BYTES:
            limit = f"{GATHERED_MAX_BYTES} bytes"
            raise UpstreamFailed(
                f"the responses are larger than {limit}; ask for fewer answers at once"
            )
        try:
            self._take(at, orjson.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(
                f"the response to part {at} has another format: {error!r}"
            ) from error

    def pieces(self, decoded_tokens: int) -> Iterator[bytes]:
        """Return the joined response; `decoded_tokens` are those of all its parts."""
        base = self._base[0]
        if base is None:
            yield b"["
            yield from self._join_items()
            yield b"]"
            return
        usages = [self._usages[at] for at in sorted(self._usages)]
        usage = joined_usage(usages) if usages else self._usage
        if usages and self._array.choices > 1:  # an engine counts only the first answer
            usage["completion_tokens"] = decoded_tokens
            usage["total_tokens"] = usage["prompt_tokens"] + decoded_tokens
        shared = {**base, "usage": usage} if usage else base
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
            elif isinstance(array, Fork) and (usage := base.get("usage")):
                self._usages[at] = usage
        self._base[at] = base if at == 0 else None
        self._items[at] = []
        for index, item in enumerate(items, at * array.choices):
            numbered = {**item, "index": index} if "index" in item else item
            encoded = orjson.dumps(numbered)
            self._items[at].append(encoded)
            if isinstance(array, PromptArray) and array.is_ranked:
                self._scores[encoded] = next(item[name] for name in _SCORES if name in item)

    def _join_items(self) -> Iterator[bytes]:
        array = self._array
        items = [item for at in range(array.count) for item in self._items[at]]
        if isinstance(array, PromptArray) and array.is_ranked:
            items = sorted(items, key=lambda item: -self._scores[item])[: array.top_n]
        for number, item in enumerate(items):
            yield b"," + item if number else item


def joined_usage(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the usage of a fork from those of its answers: the prompt counts once.

    Source: OpenAI's API reference, "Create chat completion", `n`.
    """
    first = usages[0]
    completion_tokens = sum(usage["completion_tokens"] for usage in usages)
    total_tokens = first["prompt_tokens"] + completion_tokens
    return {**first, "completion_tokens": completion_tokens, "total_tokens": total_tokens}


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
        ends: Gets the events of a fork that have `usage` and no choice, by part.
    """

    holds_whole = False

    def __init__(
        self,
        array: PromptArray | Fork,
        at: int,
        shared: dict[str, Any],
        done: set[int],
        ends: dict[int, list[dict[str, Any]]],
    ) -> None:
        super().__init__()
        self._ends = ends if isinstance(array, Fork) else None
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
        return b"" if self._is_end(piece) else data_event(piece)

    def _is_end(self, piece: dict[str, Any]) -> bool:
        """Keep an event with the usage of a fork's answers, which is sent once for all."""
        if self._ends is None or piece.get("choices") != [] or not piece.get("usage"):
            return False
        self._ends.setdefault(self._at, []).append(piece)
        return True


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
    array: PromptArray | Fork,
    client_response: Response,
    forward: Callable[[ProxyRequest, Response], Awaitable[None]],
) -> None:
    """Answer the parts of a request, as many at once as slots are leased for them.

    One part at a time waits for a slot, so the request has one place in the queue. Whole
    responses are joined, and streams are passed on as one stream.
    """
    is_stream = array.request.is_stream and array.request.kind.generates
    gather, turn = Gather(array), asyncio.Lock()
    shared: dict[str, Any] = {}
    done: set[int] = set()
    ends: dict[int, list[dict[str, Any]]] = {}

    def new_part(at: int) -> _Part:
        renumbered = _RenumberedPart(array, at, shared, done, ends) if is_stream else None
        return _Part(client_response, renumbered or _GatheredPart(gather, at), turn)

    async def forward_part(request: ProxyRequest, part: _Part) -> None:
        try:
            await forward(request, part)
            client_response.record.add(part.record)
        finally:
            part.is_leased.set()

    try:
        async with asyncio.TaskGroup() as group:
            for at in range(array.count):
                part = new_part(at)
                group.create_task(forward_part(array.part(at), part))
                await part.is_leased.wait()
        if is_stream:
            if events := [event for at in sorted(ends) for event in ends[at]]:
                usage = joined_usage([event["usage"] for event in events])
                await client_response.write(data_event({**events[0], "usage": usage}))
            await client_response.finish(b"data: [DONE]\n\n" if done else b"")
        else:
            timings = client_response.record.timings
            pieces = gather.pieces(timings.decoded_tokens if timings else 0)
            await _send_whole(list(pieces), client_response)
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
