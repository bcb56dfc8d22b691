"""The first start of each variant: whether it runs at all, and how large its requests may be."""

from __future__ import annotations

from random import Random
from typing import Final

import orjson

from supervisor.bench.instance import private_instance
from supervisor.bench.sizes import Measured
from supervisor.bench.variants import VariantSpec
from supervisor.bench.workloads.requests import complete, post, rate
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import WorkloadFailed
from supervisor.engine_client.client import EngineClient
from supervisor.host.paths import Directories

_PROMPT_WORDS: Final = 48
_ANSWER_TOKENS: Final = 12
# What an engine of an older build, which does not tell, most likely has.
_CTX_SLOT: Final = 512


async def rehearse(spec: VariantSpec, directories: Directories) -> Measured:
    """Start a variant and send one short request.

    Raises:
        StartFailed, EngineFailed: It does not run.
        WorkloadFailed: It rejects the request.
    """
    sample = text(Random(0), _PROMPT_WORDS)  # noqa: S311 (words of a prompt)
    async with private_instance(spec.plan, directories) as instance, instance.client() as client:
        slots, ctx_slot = await _slots(client)
        tokens = await _count(client, sample)
        generates = not (spec.plan.embedding and spec.plan.embedding.is_only)
        prefill, decode = await _rates(client, sample) if generates else (0.0, 0.0)
    return Measured(prefill, decode, ctx_slot, slots, tokens / _PROMPT_WORDS)


async def _slots(client: EngineClient) -> tuple[int, int]:
    """The number of slots, and the context of one."""
    response = await client.get("/props")
    match orjson.loads(response.body) if response.error is None else None:
        case {"total_slots": int(slots), "default_generation_settings": {"n_ctx": int(ctx)}}:
            return max(1, slots), ctx or _CTX_SLOT
        case _:
            return 1, _CTX_SLOT


async def _count(client: EngineClient, sample: str) -> int:
    answer = orjson.loads(await post(client, "/tokenize", {"content": sample}))
    match answer:
        case {"tokens": [*tokens]} if tokens:
            return len(tokens)
        case _:
            raise WorkloadFailed("/tokenize: an answer without tokens")


async def _rates(client: EngineClient, sample: str) -> tuple[float, float]:
    reply = await complete(client, sample, _ANSWER_TOKENS)
    timings = reply.timings
    return (
        rate(timings.prompt_tokens, timings.prompt_ms) or 0.0,
        rate(timings.decoded_tokens, timings.decode_ms) or 0.0,
    )
