"""Random requests of several kinds for several models, and clients that send them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.bench.conversations import WORDS

TIMEOUT_S = 300
TOKENS = (8, 16, 24, 32)
PROMPT_WORDS = (10, 80)


@dataclass(frozen=True)
class ModelRequest:
    """One request: a chat completion, else a text completion.

    Attributes:
        tokens: `max_tokens`.
        words: The prompt.
    """

    model: str
    is_chat: bool
    is_stream: bool
    tokens: int
    words: str

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> Mapping[str, object]:
        prompt = {"messages": [{"role": "user", "content": self.words}]}
        return {
            **(prompt if self.is_chat else {"prompt": self.words}),
            "model": self.model,
            "stream": self.is_stream,
            "max_tokens": self.tokens,
            "temperature": 0,
        }


@dataclass(frozen=True)
class Answer:
    """The outcome of a request.

    Attributes:
        duration_s: From the request to the end of the answer.
        request_id: `X-Request-Id`; empty without an answer.
        problem: Why the answer is not complete, or None.
        is_cut: Whether the answer began but did not complete.
    """

    request: ModelRequest
    duration_s: float
    request_id: str = ""
    problem: str | None = None
    is_cut: bool = False


def make_requests(
    models: Sequence[str], seed: int, *, clients: int, count: int
) -> list[list[ModelRequest]]:
    """Return the requests of each client, in order; deterministic for a seed."""
    rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
    requests = [_request(rng, models) for _ in range(count)]
    return [requests[number::clients] for number in range(clients)]


def _request(rng: random.Random, models: Sequence[str]) -> ModelRequest:
    return ModelRequest(
        model=rng.choice(models),
        is_chat=rng.random() < 0.5,
        is_stream=rng.random() < 0.5,
        tokens=rng.choice(TOKENS),
        words=" ".join(rng.choices(WORDS, k=rng.randint(*PROMPT_WORDS))),
    )


async def send_all(url: str, lists: Sequence[Sequence[ModelRequest]]) -> list[list[Answer]]:
    """Send the requests of each client one after another; return the answers per client."""
    async with session(url) as http, asyncio.TaskGroup() as group:
        clients = [group.create_task(_send_each(http, requests)) for requests in lists]
    return [client.result() for client in clients]


def session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))


async def _send_each(http: aiohttp.ClientSession, requests: Sequence[ModelRequest]) -> list[Answer]:
    return [await send(http, request) for request in requests]


async def send(http: aiohttp.ClientSession, request: ModelRequest) -> Answer:
    """Send a request, and check that its answer is complete."""
    began_at_s, has_begun, request_id = time.monotonic(), False, ""
    try:
        async with http.post(request.path, json=request.body) as response:
            has_begun = response.status == 200
            request_id = response.headers.get("X-Request-Id", "")
            text = await response.text()
        problem = _problem(request, text) if has_begun else f"{response.status}: {text[:300]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        problem = repr(error)
    duration_s = time.monotonic() - began_at_s
    return Answer(
        request, duration_s, request_id, problem, is_cut=has_begun and problem is not None
    )


def _problem(request: ModelRequest, text: str) -> str | None:
    """Return why an answer is not complete, or None."""
    if not request.is_stream:
        return None if _is_finished([json.loads(text)]) else f"no finish_reason: {text[:300]}"
    data_lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    if data_lines[-1:] != ["[DONE]"]:
        return f"ends with {data_lines[-1:]}"
    chunks = [json.loads(line) for line in data_lines[:-1]]
    return None if _is_finished(chunks) else "[DONE], but no finish_reason"


def _is_finished(chunks: Sequence[Mapping[str, Any]]) -> bool:
    return any(entry.get("finish_reason") for chunk in chunks for entry in chunk.get("choices", ()))
