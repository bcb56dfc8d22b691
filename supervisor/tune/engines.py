"""Sends the requests that measure engines, and reads what each took."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.upstream.timings import Timings
from supervisor.bench.workloads.requests import post, rate, together
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.engine_client.client import EngineClient
from supervisor.tune.texts import LONG_TEXT

# Not greedy: a small model repeats itself then, which drafting from the text would profit from.
_SAMPLED: Final[Mapping[str, Any]] = {
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
    "cache_prompt": False,
    "return_tokens": False,
}


async def tokens_of(client: EngineClient, text: str) -> list[int]:
    """Return the tokens of a text, with those that begin a prompt."""
    body = await post(client, "/tokenize", {"content": text, "add_special": True})
    match orjson.loads(body):
        case {"tokens": list(tokens)} if tokens:
            return [int(one) for one in tokens]
    raise WorkloadFailed("/tokenize returned no tokens")


async def long_prompt(client: EngineClient, tokens: int) -> list[int]:
    """Return a text of exactly this many tokens."""
    found = await tokens_of(client, LONG_TEXT)
    return (found * (tokens // len(found) + 1))[:tokens]


async def answer(client: EngineClient, prompt: Sequence[int], tokens: int) -> Timings:
    """Generate exactly this many tokens; not streamed, so that nothing competes for the cores."""
    body = {"prompt": prompt, "n_predict": tokens, **_SAMPLED}
    found = orjson.loads(await post(client, "/completion", body))
    timings = Timings.read(found.get("timings"))
    if timings is None or not rate(timings.decoded_tokens, timings.decode_ms):
        raise WorkloadFailed("/completion answered without timings")
    return timings


async def total_rate(
    clients: Sequence[EngineClient], prompts: Sequence[Sequence[int]], tokens: int
) -> float:
    """Return the generated tokens per second of streams that run together."""
    began_at_s = time.perf_counter()
    found = await together(
        [answer(one, prompt, tokens) for one, prompt in zip(clients, prompts, strict=True)]
    )
    generated = sum(one.decoded_tokens for one in found)
    return generated / max(1e-6, time.perf_counter() - began_at_s)
