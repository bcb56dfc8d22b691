"""Texts to embed: one after another, then many in one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Final

import orjson

from supervisor.bench.figures import Figure, percentile
from supervisor.bench.workloads.requests import post
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import (
    MeasuredEngine,
    Outcome,
    Workload,
    WorkloadFailed,
)
from supervisor.engine_client.client import EngineClient

_PATH: Final = "/v1/embeddings"
_TEXTS: Final = 8


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    words = engine.sizes.words(engine.sizes.embedded // 2)
    took_ms, tokens = list[float](), 0
    async with engine.client() as client:
        for _ in range(_TEXTS):
            began_s = time.perf_counter()
            tokens += await _embed(client, [text(rng, words)])
            took_ms.append(1000 * (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        together = await _embed(client, [text(rng, words) for _ in range(2 * _TEXTS)])
        rate = together / (time.perf_counter() - began_s)
    values = {
        "embedding.latency_p50": percentile(took_ms, 0.5),
        "embedding.latency_p95": percentile(took_ms, 0.95),
        "embedding.total_rate": rate,
    }
    return Outcome(values, tokens + together)


async def _embed(client: EngineClient, texts: Sequence[str]) -> int:
    """Embed texts in one request; return their tokens."""
    answer = orjson.loads(await post(client, _PATH, {"input": texts}))
    match answer:
        case {"usage": {"prompt_tokens": int(tokens)}}:
            return tokens
        case _:
            raise WorkloadFailed(f"{_PATH}: an answer without its number of tokens")


EMBEDDING: Final = Workload(
    "embedding",
    "texts to embed, one by one and many in one request",
    (
        Figure("embedding.latency_p50", "one text, median", "ms"),
        Figure("embedding.latency_p95", "one text, 95 of 100", "ms"),
        Figure("embedding.total_rate", "many texts", "tokens/s"),
    ),
    _run,
    for_embedding=True,
)
