"""One long prompt that nothing is cached of."""

from __future__ import annotations

from random import Random
from typing import Final

from supervisor.bench.figures import Figure
from supervisor.bench.workloads.requests import complete, present, rate
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import MeasuredEngine, Outcome, Workload


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    prompt = text(rng, engine.sizes.words(engine.sizes.long_prompt))
    async with engine.client() as client:
        reply = await complete(client, prompt, 1)
    values = present(
        {
            "long-prompt.first_token": reply.first_token_ms,
            "long-prompt.prefill_rate": rate(reply.timings.prompt_tokens, reply.timings.prompt_ms),
        }
    )
    return Outcome(values, reply.tokens)


LONG_PROMPT: Final = Workload(
    "long-prompt",
    "one long prompt, and its first token",
    (
        Figure("long-prompt.first_token", "first token", "ms"),
        Figure("long-prompt.prefill_rate", "prefill", "tokens/s"),
    ),
    _run,
)
