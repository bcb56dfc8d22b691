"""Rates of a server: generated and computed tokens per second, for one client and for several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import aiohttp

TOKENS: Final = 96


async def together(http: aiohttp.ClientSession, clients: int, tokens: int = TOKENS) -> float:
    """Generated tokens of all clients per second, two answers for each."""

    async def client(number: int) -> int:
        answers = [await answer(http, f"Story {number}.{turn}", tokens) for turn in range(2)]
        return sum(answer["predicted_n"] for answer in answers)

    began_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(number)) for number in range(clients)]
    return sum(task.result() for task in tasks) / (time.monotonic() - began_at_s)


async def answer(
    http: aiohttp.ClientSession, text: str, tokens: int, *, reuses_cache: bool = True
) -> Mapping[str, Any]:
    """The engine's `timings` of one answer of exactly so many tokens."""
    body = {
        "cache_prompt": reuses_cache,
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        content: dict[str, Any] = await response.json()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {content}")
    timings: dict[str, Any] = content["timings"]
    return timings
