"""Measures the speed of an engine that serves no requests yet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.upstream.timings import Timings
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.flags.thread_speeds import ThreadSpeeds

_TIMEOUT_S: Final = 10.0
_DECODE_TOKENS: Final = 24
# Token ids that every vocabulary has: texts make different numbers of tokens.
_PROMPT: Final = tuple(3 + number % 64 for number in range(384))
# Fewer sequences say little about many.
_TOGETHER_MIN: Final = 4
_TOGETHER_MAX: Final = 8
_TOGETHER_TOKENS: Final = 12


async def measure(client: EngineClient, slots: int) -> ThreadSpeeds | None:
    """Decode one sequence, compute a prompt, decode as many sequences as slots, 8 at most.

    Returns:
        None where the engine generates no text, does not answer, or takes more than 10 s.
    """
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await _measure(client, slots)
    except (TimeoutError, EngineUnreachable):
        return None


async def _measure(client: EngineClient, slots: int) -> ThreadSpeeds | None:
    alone = await _complete(client, "Once upon a time", _DECODE_TOKENS)
    long = await _complete(client, _PROMPT, 1)
    if not (alone and long and alone.decode_ms and long.prompt_ms):
        return None
    return ThreadSpeeds(
        decode=1000 * alone.decoded_tokens / alone.decode_ms,
        prefill=1000 * long.prompt_tokens / long.prompt_ms,
        together=await _together(client, min(slots, _TOGETHER_MAX)),
    )


async def _together(client: EngineClient, sequences: int) -> float | None:
    if sequences < _TOGETHER_MIN:
        return None
    began_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_answered(client, f"Story {number}")) for number in range(sequences)
        ]
    took_s = time.monotonic() - began_at_s
    found = [timings for task in tasks if (timings := task.result())]
    if len(found) < sequences:
        raise EngineUnreachable(f"{sequences - len(found)} of {sequences} sequences failed")
    return sum(timings.decoded_tokens for timings in found) / took_s


async def _answered(client: EngineClient, prompt: str) -> Timings | None:
    """As `_complete`, without an error: the group of all would wrap it."""
    try:
        return await _complete(client, prompt, _TOGETHER_TOKENS)
    except EngineUnreachable:
        return None


async def _complete(
    client: EngineClient, prompt: str | Sequence[int], tokens: int
) -> Timings | None:
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "cache_prompt": False,
    }
    response = await client.post("/completion", body)
    content: Mapping[str, Any] = orjson.loads(response.body) if response.status == 200 else {}
    return Timings.read(content.get("timings"))
