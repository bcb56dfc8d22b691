"""Sends the requests of workloads, which are made of plain words, and times the replies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import orjson

from proxy.upstream.upstream import Timings
from supervisor.bench.workload import WorkloadFailed
from supervisor.engine.client import EngineClient, ErrorResponse

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
    body = {"prompt": prompt, "n_predict": tokens, **_EXACT}
    return await _streamed(client, "/completion", body)


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
