"""Workloads: the sizes of their requests, how requests are sent, and a replay's plan.

A replay takes the latest recorded conversations, complete as far as the limits allow. It sends a
request once all requests are answered that had ended before it began, after a pause of at most the
limit. So as many requests are in flight as there were, at any speed of the variant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import orjson

from proxy.upstream.upstream import Timings
from supervisor.bench.figures import Figure
from supervisor.engine.client import EngineClient, ErrorResponse
from supervisor.records.requests import RecordedRequest

# A workload takes some seconds on any machine: long enough to be exact, short enough to repeat. The
# bounds keep figures of different machines comparable.
_ANSWER_S, _ANSWER_MIN, _ANSWER_MAX = 0.3, 8, 96
_GENERATION_S, _GENERATION_MIN, _GENERATION_MAX = 2.0, 24, 512
_SYSTEM_S, _SYSTEM_MIN, _SYSTEM_MAX = 0.5, 32, 1024
_LONG_S, _LONG_MIN, _LONG_MAX = 2.0, 128, 16384
_EMBEDDED_MAX: Final = 128
# The rest of a context is for the chat template's words and the error of word counts.
_MARGIN: Final = 0.75
_QUESTION_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class Measured:
    """The abilities of a variant, from a first short request."""

    prefill_rate: float  # tokens/s of one stream; 0 if it generates no text
    decode_rate: float  # in the same way
    ctx_slot: int  # the context of each slot in tokens
    slots: int
    tokens_per_word: float


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of requests, in tokens unless named otherwise."""

    system: int  # the system prompt that conversations share
    question: int  # added by a client in each turn
    answer: int  # generated in each turn
    turns: int  # in one conversation
    long_prompt: int
    generation: int  # one long answer
    batch_prompts: int  # number of prompts in one array
    embedded: int  # one text to embed
    slots: int  # number of clients at once
    context: int  # limit of one request, in each variant
    tokens_per_word: float

    def words(self, tokens: int) -> int:
        """Return how many words make about this many tokens."""
        return max(1, round(tokens / self.tokens_per_word))


def choose_sizes(variants: list[Measured]) -> Sizes:
    """Choose sizes that fit into the smallest context and suit the fastest variant."""
    ctx = int(_MARGIN * min(variant.ctx_slot for variant in variants))
    slots = max(variant.slots for variant in variants)
    shared_ctx = ctx // slots  # slots of one unified cache share the context
    prefill = max(variant.prefill_rate for variant in variants)
    decode = max(variant.decode_rate for variant in variants)
    answer = clamp(decode * _ANSWER_S, _ANSWER_MIN, min(_ANSWER_MAX, ctx // 16))
    question = min(_QUESTION_TOKENS, max(4, ctx // 32))
    system = clamp(prefill * _SYSTEM_S, _SYSTEM_MIN, min(_SYSTEM_MAX, shared_ctx // 2, ctx // 3))
    return Sizes(
        system=system,
        question=question,
        answer=answer,
        turns=max(1, min(6, (ctx - system) // (answer + question + _QUESTION_TOKENS))),
        long_prompt=clamp(prefill * _LONG_S, _LONG_MIN, min(_LONG_MAX, ctx - 8)),
        generation=clamp(decode * _GENERATION_S, _GENERATION_MIN, min(_GENERATION_MAX, ctx // 2)),
        batch_prompts=max(4, 2 * slots),
        embedded=min(_EMBEDDED_MAX, ctx),
        slots=max(2, slots),
        context=ctx,
        tokens_per_word=max(variant.tokens_per_word for variant in variants),
    )


def clamp(tokens: float, low: int, high: int) -> int:
    return max(1, min(max(round(tokens), low), high))


class WorkloadFailed(Exception):
    """The engine rejected a request, or did not finish it in time; the text says which."""


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """A ready engine that nothing else uses."""

    # Opens a client with its own connections, one for each simulated client.
    client: Callable[[], EngineClient]
    sizes: Sizes  # sizes of the requests; the same for all variants
    model: str  # its name in the settings
    # Whether a turn names the slot of the turn before, as the proxy does for an engine that does
    # not match prompts to slots.
    names_slots: bool = False
    # Requests of clients, in the order in which they ended.
    recorded: Sequence[RecordedRequest] = ()


# The known values of one run, by figure name, and the number of computed tokens.
Outcome = tuple[Mapping[str, float], int]


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    description: str
    figures: tuple[Figure, ...]  # all that it may return
    # Sends the requests; equal generators make equal requests.
    run: Callable[[MeasuredEngine, Random], Awaitable[Outcome]]
    # Whether it needs a model for embeddings, not for text.
    for_embedding: bool = False
    # Returns why it cannot run for a model with its recorded requests, as a clause, or None.
    unavailable: Callable[[str, Sequence[RecordedRequest]], str | None] = lambda _, __: None


_PAUSE_MAX_S: Final = 0.25
_REQUESTS_MAX: Final = 64
# Precision of clocks: a request that begins this soon after an end may have begun before it.
_CLOCK_S: Final = 0.002


@dataclass(slots=True)
class ReplayedRequest:
    conversation: int  # its number, from 0
    prompt: int  # tokens of the prompt
    # Tokens at the beginning of the prompt that repeat the conversation so far or, in its first
    # request, the beginning that other conversations share.
    shared: int
    answer: int  # tokens to generate
    began_s: float  # when it was recorded, from the start of the first
    ended_s: float
    after: tuple[int, ...] = ()  # indices of the requests that must be answered before it is sent
    pause_s: float = 0.0


def plan_replay(
    recorded: Iterable[RecordedRequest], *, context: int, prompts: int, answers: int
) -> list[ReplayedRequest]:
    """Return the requests of a replay in the order in which they began; at least one.

    Limits, in tokens: `context` of one request, `prompts` of all computed prompts, `answers`.
    """
    chosen: list[ReplayedRequest] = []
    for number, conversation in enumerate(_latest_first(recorded)):
        before: ReplayedRequest | None = None
        for began_s, request in conversation:
            answer = max(1, min(request.generated_tokens, context // 2))
            prompt = max(1, min(request.prompt_tokens, context - answer))
            shared = _repeated_tokens(before, request, prompt)
            is_over = prompt - shared > prompts or answer > answers
            if (is_over and chosen) or len(chosen) >= _REQUESTS_MAX:
                break
            prompts, answers = prompts - (prompt - shared), answers - answer
            ended_s = began_s + request.ended_at - request.began_at
            before = ReplayedRequest(number, prompt, shared, answer, began_s, ended_s)
            chosen.append(before)
        if before is None:
            break
    return _order_requests(sorted(chosen, key=lambda entry: entry.began_s))


def _latest_first(recorded: Iterable[RecordedRequest]) -> list[list[tuple[float, RecordedRequest]]]:
    """Group requests with their starts by conversation, the latest conversation first.

    The requests of each run of the daemon follow all of the runs before it.
    """
    groups: dict[object, list[tuple[float, RecordedRequest]]] = {}
    run, zero_at, last_end_s = None, 0.0, 0.0
    for request in recorded:
        if request.run != run:
            run, zero_at = request.run, request.began_at - last_end_s
        last_end_s = max(last_end_s, request.ended_at - zero_at)
        key = object() if request.conversation is None else (run, request.conversation)
        groups[key] = [*groups.pop(key, []), (request.began_at - zero_at, request)]
    return [sorted(group, key=itemgetter(0)) for group in reversed(groups.values())]


def _repeated_tokens(before: ReplayedRequest | None, request: RecordedRequest, prompt: int) -> int:
    """Return how many tokens of a prompt repeat earlier messages.

    A prompt longer than the last one continues from its answer. A shorter one was cut by its
    client; then the cached tokens count.
    """
    if before and prompt > before.prompt:
        return min(prompt, before.prompt + before.answer)
    return min(prompt, request.cached_tokens)


def _order_requests(ordered: list[ReplayedRequest]) -> list[ReplayedRequest]:
    for at, entry in enumerate(ordered):
        latest_s = entry.began_s + _CLOCK_S
        earlier = enumerate(ordered[:at])
        entry.after = tuple(place for place, other in earlier if other.ended_s <= latest_s)
        if entry.after:
            last_end_s = max(ordered[place].ended_s for place in entry.after)
            entry.pause_s = min(_PAUSE_MAX_S, max(0.0, entry.began_s - last_end_s))
    return ordered


WORDS: Final = tuple(Path(__file__).with_name("words.txt").read_text("ascii").split())


def text(rng: Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


Message = Mapping[str, str]
_Result = TypeVar("_Result")
_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Reply:
    """One generated answer; `first_token_ms` counts from sending the request to its first text."""

    text: str
    first_token_ms: float
    timings: Timings
    token_ids: tuple[int, ...] = ()  # set by `complete_tokens` only
    id_slot: int | None = None  # None from `chat`: its events do not have it

    @property
    def tokens(self) -> int:
        return self.timings.prompt_tokens + self.timings.decoded_tokens

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second, without the first; None if there are too few."""
        return rate(self.timings.decoded_tokens, self.timings.decode_ms)


async def chat(
    client: EngineClient, messages: Sequence[Message], tokens: int, id_slot: int | None = None
) -> Reply:
    """Generate exactly this many tokens, greedily, unless the context is full."""
    body = {"messages": messages, "max_tokens": tokens, **_EXACT, **_slot(id_slot)}
    return await _streamed(client, "/v1/chat/completions", body)


async def complete(client: EngineClient, prompt: str, tokens: int) -> Reply:
    """Like `chat`, but without a chat template."""
    return await _streamed(client, "/completion", {"prompt": prompt, "n_predict": tokens, **_EXACT})


async def complete_tokens(
    client: EngineClient, prompt: Sequence[int], tokens: int, id_slot: int | None = None
) -> Reply:
    """Like `complete`, but with the prompt and the answer as tokens."""
    body = {"prompt": prompt, "n_predict": tokens, "return_tokens": True, **_EXACT}
    body |= _slot(id_slot)
    return await _streamed(client, "/completion", body)


async def post(client: EngineClient, path: str, body: Mapping[str, Any]) -> bytes:
    response = await client.post(path, body)
    if response.error:
        raise _rejection(path, response.error)
    return response.body


async def tokenize(client: EngineClient, content: str, *, add_special: bool = False) -> list[int]:
    """Return the tokens of a text; with `add_special`, also those that begin a prompt."""
    body = {"content": content, "add_special": add_special}
    match orjson.loads(await post(client, "/tokenize", body)):
        case {"tokens": [*tokens]} if tokens:
            return [int(token) for token in tokens]
    raise WorkloadFailed("/tokenize: an answer without tokens")


async def run_together(clients: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run clients at once; if one fails, end the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client) for client in clients]
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
    return [task.result() for task in tasks]


def first_error(error: Exception) -> Exception:
    """Return the first error within nested exception groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def rate(tokens: int, took_ms: float) -> float | None:
    """Return tokens per second, or None if nothing was computed."""
    return _MS * tokens / took_ms if tokens and took_ms > 0 else None


def without_none(values: Mapping[str, float | None]) -> Mapping[str, float]:
    return {name: value for name, value in values.items() if value is not None}


# Every variant does the same work: no early end, no random choice.
_EXACT: Mapping[str, Any] = {
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
    "cache_prompt": True,
}


def _slot(id_slot: int | None) -> dict[str, Any]:
    return {} if id_slot is None else {"id_slot": id_slot}


async def _streamed(client: EngineClient, path: str, body: Mapping[str, Any]) -> Reply:
    began_s = time.perf_counter()
    first_s: float | None = None
    parts: list[str] = []
    token_ids: list[int] = []
    id_slot: int | None = None
    timings: Timings | None = None
    async with client.stream(path, body) as events:
        if isinstance(events, ErrorResponse):
            raise _rejection(path, events)
        async for event in events:
            if piece := _piece(event):
                first_s = first_s or time.perf_counter()
                parts.append(piece)
            token_ids += event.get("tokens", ())
            id_slot = event.get("id_slot", id_slot)
            timings = Timings.read(event.get("timings")) or timings
    if timings is None:
        raise WorkloadFailed(f"{path}: the answer ended without timings")
    first_token_ms = _MS * ((first_s or time.perf_counter()) - began_s)
    return Reply("".join(parts), first_token_ms, timings, tuple(token_ids), id_slot)


def _piece(event: Mapping[str, Any]) -> str:
    match event:
        case {"content": str(piece)}:
            return piece
        case {"choices": [{"delta": {"content": str(piece)}}, *_]}:
            return piece
        case {"choices": [{"delta": {"reasoning_content": str(piece)}}, *_]}:
            return piece
        case _:
            return ""


def _rejection(path: str, error: ErrorResponse) -> WorkloadFailed:
    return WorkloadFailed(f"{path}: status {error.status}, {error.message or 'no message'}")
