"""Several clients at once: as many as slots, then twice as many."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

from supervisor.bench.figures import Figure, percentile
from supervisor.bench.workloads.requests import Message, Reply, chat, together
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import MeasuredEngine, Outcome, Workload

_REQUESTS_EACH: Final = 2
# The end of a figure's name → clients for each slot.
_LOADS: Final[Mapping[str, int]] = {"": 1, "_twice": 2}


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    values: dict[str, float] = {}
    tokens = 0
    system = text(rng, engine.sizes.words(engine.sizes.system))
    for suffix, factor in _LOADS.items():
        requests = _requests(engine, rng, system, factor * engine.sizes.slots)
        began_s = time.perf_counter()
        answers = await together([_client(engine, one) for one in requests])
        took_s = time.perf_counter() - began_s
        replies = [reply for one in answers for reply in one]
        first_ms = [one.first_token_ms for one in replies]
        generated = sum(one.timings.decoded_tokens for one in replies)
        values[f"concurrent.total_rate{suffix}"] = generated / took_s
        values[f"concurrent.first_token_p50{suffix}"] = percentile(first_ms, 0.5)
        values[f"concurrent.first_token_p95{suffix}"] = percentile(first_ms, 0.95)
        tokens += sum(one.tokens for one in replies)
    return Outcome(values, tokens)


def _requests(
    engine: MeasuredEngine, rng: Random, system: str, clients: int
) -> list[list[list[Message]]]:
    """The requests of each client, which share a system prompt."""
    words = engine.sizes.words(engine.sizes.question)
    return [
        [
            [
                {"role": "system", "content": system},
                {"role": "user", "content": text(rng, words)},
            ]
            for _ in range(_REQUESTS_EACH)
        ]
        for _ in range(clients)
    ]


async def _client(engine: MeasuredEngine, requests: Sequence[Sequence[Message]]) -> list[Reply]:
    async with engine.client() as client:
        return [await chat(client, messages, engine.sizes.answer) for messages in requests]


CONCURRENT: Final = Workload(
    "concurrent",
    "as many clients as slots at once, then twice as many",
    tuple(
        figure
        for suffix, words in (("", ""), ("_twice", ", 2 clients a slot"))
        for figure in (
            Figure(f"concurrent.total_rate{suffix}", f"all together{words}", "tokens/s"),
            Figure(f"concurrent.first_token_p50{suffix}", f"first token, median{words}", "ms"),
            Figure(f"concurrent.first_token_p95{suffix}", f"first token, 95 of 100{words}", "ms"),
        )
    ),
    _run,
)
