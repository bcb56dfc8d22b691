"""Conversations of many turns, one after another, that share a system prompt."""

from __future__ import annotations

from random import Random
from typing import Final

from supervisor.bench.figures import Figure, median_rate, percentile
from supervisor.bench.workloads.requests import Message, Reply, chat, present
from supervisor.bench.workloads.slot_use import last_used_slot, save_idle_slots
from supervisor.bench.workloads.words import text
from supervisor.bench.workloads.workload import MeasuredEngine, Outcome, Workload
from supervisor.engine_client.client import EngineClient

_CONVERSATIONS: Final = 2


async def _run(engine: MeasuredEngine, rng: Random) -> Outcome:
    system = text(rng, engine.sizes.words(engine.sizes.system))
    async with engine.client() as client:
        replies = [
            reply
            for _ in range(_CONVERSATIONS)
            for reply in await _conversation(client, system, engine, rng)
        ]
    first_ms = [one.first_token_ms for one in replies]
    values = present(
        {
            "chat.first_token_p50": percentile(first_ms, 0.5),
            "chat.first_token_p95": percentile(first_ms, 0.95),
            "chat.decode_rate": median_rate([one.decode_rate for one in replies]),
            "chat.prompt_tokens": sum(one.timings.prompt_tokens for one in replies),
        }
    )
    return Outcome(values, sum(one.tokens for one in replies))


async def _conversation(
    client: EngineClient, system: str, engine: MeasuredEngine, rng: Random
) -> list[Reply]:
    sizes, replies = engine.sizes, list[Reply]()
    messages: list[Message] = [{"role": "system", "content": system}]
    id_slot: int | None = None
    if engine.names_slots:
        await save_idle_slots(client)
    for turn in range(sizes.turns):
        messages.append({"role": "user", "content": text(rng, sizes.words(sizes.question))})
        replies.append(await chat(client, messages, sizes.answer, id_slot))
        messages.append({"role": "assistant", "content": replies[-1].text})
        if turn == 0 and engine.names_slots:
            id_slot = await last_used_slot(client)
    return replies


CHAT: Final = Workload(
    "chat",
    "conversations of many turns that share a system prompt",
    (
        Figure("chat.first_token_p50", "first token, median", "ms"),
        Figure("chat.first_token_p95", "first token, 95 of 100", "ms"),
        Figure("chat.decode_rate", "one stream", "tokens/s"),
        Figure("chat.prompt_tokens", "prompt tokens computed", "tokens"),
    ),
    _run,
)
