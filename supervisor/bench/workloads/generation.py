"""One long answer to a short prompt."""

from __future__ import annotations

from random import Random
from typing import Final

from supervisor.bench.figures import Figure
from supervisor.bench.workloads.requests import complete, present
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import MeasuredEngine, Outcome, Workload


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    prompt = text(rng, engine.sizes.words(engine.sizes.question))
    async with engine.client() as client:
        reply = await complete(client, prompt, engine.sizes.generation)
    values = present(
        {
            "generation.first_token": reply.first_token_ms,
            "generation.decode_rate": reply.decode_rate,
        }
    )
    return Outcome(values, reply.tokens)


GENERATION: Final = Workload(
    "generation",
    "one long answer to a short prompt",
    (
        Figure("generation.first_token", "first token", "ms"),
        Figure("generation.decode_rate", "one stream", "tokens/s"),
    ),
    _run,
)
