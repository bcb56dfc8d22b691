"""Rates of a server: generated and computed tokens per second, for one client and for several."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

TOKENS: Final = 96


async def together(
    http: aiohttp.ClientSession,
    clients: int,
    tokens: int = TOKENS,
    *,
    streams: bool = False,
    about: str = "Story",
) -> float:
    """Generated tokens of all clients per second, two answers for each; prompts begin `about`."""

    async def client(number: int) -> int:
        answers = [
            await answer(http, f"{about} {number}.{turn}", tokens, streams=streams)
            for turn in range(2)
        ]
        return sum(answer["predicted_n"] for answer in answers)

    began_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(number)) for number in range(clients)]
    return sum(task.result() for task in tasks) / (time.monotonic() - began_at_s)


async def answer(
    http: aiohttp.ClientSession,
    text: str,
    tokens: int,
    *,
    reuses_cache: bool = True,
    streams: bool = False,
) -> Mapping[str, Any]:
    """The engine's `timings` of one answer of exactly so many tokens."""
    body = {
        "cache_prompt": reuses_cache,
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": streams,
    }
    # An engine closes a connection after a stream without saying so.
    headers = {"Connection": "close"} if streams else {}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        received = await response.text()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {received}")
    # The last event before the end mark has them.
    content = json.loads(received.split("data: ")[-2] if streams else received)
    timings: dict[str, Any] = content["timings"]
    return timings
