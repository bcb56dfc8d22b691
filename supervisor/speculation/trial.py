"""Finds out what guessing tokens ahead costs an engine, by some short answers to nobody.

The text repeats itself, so that every way of guessing has something to go by. Answers of both kinds
take turns, and the median of each counts: of a busy machine the quickest would be luck, which short
answers have more often than long ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, Final

from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.speculation.benefit import SpeculationConfig, SpeculationCost, Tokens
from supervisor.warmup.prefill import timings_in

_PROMPT: Final = 8 * "one two three four five six seven eight nine ten "
# The last token is never guessed, the first comes of the prompt.
_UNGUESSED: Final = 2
# Guessing by n-grams begins with 48.
_GUESSED: Final = 64
_ROUNDS: Final = 3
# A model that makes one token a second has shown what it can by then.
_LIMIT_S: Final = 90.0

Count = Callable[[Tokens], None]
Answer = tuple[Tokens, float]


async def measure(
    client: EngineClient, drafting: SpeculationConfig, count: Count
) -> SpeculationCost | None:
    """Return what guessing costs; None where the engine guessed nothing, or not as we think.

    Cancelled, the answer under way ends with the present batch.

    Args:
        client: An engine that does nothing else.
        drafting: How it guesses.
        count: Told the tokens of each answer.

    Raises:
        EngineUnreachable: No answer.
    """
    slot = await _unused_slot(client) if drafting.has_own_slots else None
    plain: list[Answer] = []
    guessed: list[Answer] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(_LIMIT_S):
            for _ in range(_ROUNDS):
                plain += [await _answer(client, _UNGUESSED, slot, count) for _ in range(_ROUNDS)]
                guessed.append(await _answer(client, _GUESSED, slot, count))
    return costs(plain, guessed)


def costs(plain: list[Answer], guessed: list[Answer]) -> SpeculationCost | None:
    """Return what answers tell; None where nothing, or too much, was guessed.

    Args:
        plain: Answers without guesses: their tokens, and the milliseconds from the first to the
            last.
        guessed: Answers with guesses.
    """
    steps = [ms / (tokens.decoded - 1) for tokens, ms in plain if tokens.decoded > 1]
    if not steps or any(tokens.drafted for tokens, _ in plain):
        return None
    step_ms = median(steps)
    added = [
        (ms - (tokens.decoded - 1 - tokens.accepted) * step_ms) / tokens.drafted
        for tokens, ms in guessed
        if tokens.drafted
    ]
    return SpeculationCost(step_ms, max(0.0, median(added))) if added and step_ms > 0 else None


async def _answer(client: EngineClient, limit: int, slot: int | None, count: Count) -> Answer:
    body = {
        "prompt": _PROMPT,
        "n_predict": limit,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
        "stream": True,
    }
    named = {} if slot is None else {"id_slot": slot}
    said: Mapping[str, Any] = {}
    async with client.stream("/completion", body | named) as answer:
        async for line in answer.aiter_lines():
            said = timings_in(line) or said
    tokens = Tokens(
        *(int(said.get(name, 0)) for name in ("predicted_n", "draft_n", "draft_n_accepted"))
    )
    count(tokens)
    return tokens, float(said.get("predicted_ms", 0))


async def _unused_slot(client: EngineClient) -> int:
    """Return a slot that holds nothing, else the one that is unused for longest.

    Those that were restored are filled from the lowest on, and tell of no request either.
    """
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        raise EngineUnreachable("it does not tell of its slots")
    never = [slot.id_slot for slot in found if slot.id_task is None]
    return max(never) if never else min(found, key=lambda one: one.id_task or 0).id_slot
