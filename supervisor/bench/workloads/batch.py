"""Many short prompts in one request, with short answers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import Random
from typing import Final

import orjson

from proxy.upstream.timings import Timings
from supervisor.bench.figures import Figure
from supervisor.bench.workloads.requests import post
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import (
    MeasuredEngine,
    Outcome,
    Workload,
    WorkloadFailed,
)

_PATH: Final = "/completion"
_ANSWER_TOKENS: Final = 8


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    sizes = engine.sizes
    words = sizes.words(2 * sizes.question)
    body = {
        "prompt": [text(rng, words) for _ in range(sizes.batch_prompts)],
        "n_predict": _ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    began_s = time.perf_counter()
    async with engine.client() as client:
        answer = orjson.loads(await post(client, _PATH, body))
    took_s = time.perf_counter() - began_s
    found = _timings(answer if isinstance(answer, list) else [answer])
    tokens = sum(one.prompt_tokens + one.decoded_tokens for one in found)
    return Outcome({"batch.total_rate": tokens / took_s}, tokens)


def _timings(answers: Iterable[object]) -> list[Timings]:
    found = []
    for answer in answers:
        timings = Timings.read(answer.get("timings")) if isinstance(answer, dict) else None
        if timings is None:
            raise WorkloadFailed(f"{_PATH}: an answer without timings")
        found.append(timings)
    return found


BATCH: Final = Workload(
    "batch",
    "many short prompts in one request",
    (Figure("batch.total_rate", "prompts and answers together", "tokens/s"),),
    _run,
)
