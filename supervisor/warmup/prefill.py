"""Warm-up requests before an engine serves, and the prefill of one prompt.

The first token after loading is slow: pages of the model are read in, threads and kernels are
created. A token of a prompt of our own takes that time instead of a client's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, Final

from proxy.upstream.timings import Timings
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.warmup.prompts import WarmPrompt

# Streamed, so that the engine notices a cancelled request.
_ONE_TOKEN: Final[Mapping[str, Any]] = {
    "max_tokens": 1,
    "stream": True,
    "return_progress": True,
    "timings_per_token": True,
    "cache_prompt": True,
}


# The last token of an answer is not in the cache, nor is the one that ends it.
_TOKENS_AWAY_MAX: Final = 2


@dataclass(frozen=True, slots=True)
class FilledSlot:
    """A slot that holds a prompt; `tokens` with one that was generated."""

    id_slot: int
    tokens: int
    cached_tokens: int


class Warmup(StrEnum):
    """The result of a warm-up."""

    WARM = "warm"
    NOTHING_TO_WARM = "nothing to warm"
    FAILED = "failed"


async def warm(client: EngineClient) -> Warmup:
    """Generate one token, or one embedding if that is rejected.

    An engine that rejects both with 4xx or 501 is as ready as it gets. Any other error, or no
    response, means it is unhealthy. A model that generates no text answers 500 to a completion
    (build 10434).
    """
    try:
        refusal = await client.one_token()
        if refusal is None:
            return Warmup.WARM
        vector = await client.one_vector()
    except EngineUnreachable:
        return Warmup.FAILED
    can_serve = vector is None or all(map(_is_unsupported, (refusal, vector)))
    return Warmup.NOTHING_TO_WARM if can_serve else Warmup.FAILED


def _is_unsupported(refusal: ErrorResponse) -> bool:
    return 400 <= refusal.status < 500 or refusal.status == 501


async def prefill(client: EngineClient, prompt: WarmPrompt) -> Timings | ErrorResponse:
    """Process a prompt and generate one token; cancelled, it ends with the present batch.

    Raises:
        EngineUnreachable: No response. No deadline: a long prompt takes long.
    """
    timings = None
    async with client.stream("/v1/chat/completions", {**prompt.body, **_ONE_TOKEN}) as events:
        if isinstance(events, ErrorResponse):
            return events
        async for event in events:
            timings = Timings.read(event.get("timings")) or timings
    return timings or Timings(0, 0, 0, 0, 0)


async def prefill_slot(client: EngineClient, prompt: WarmPrompt) -> FilledSlot | None:
    """Prefill a prompt in a slot that the engine chooses; None if it refused or does not say where.

    The slot is that of the latest task, as long as nobody else sends requests.

    Raises:
        EngineUnreachable: No response.
    """
    found = await prefill(client, prompt)
    listed = await slots.get_slots(client)
    if isinstance(found, ErrorResponse) or isinstance(listed, ErrorResponse) or not listed:
        return None
    latest = max(listed, key=attrgetter("task"))
    tokens = found.cached_tokens + found.prompt_tokens + found.decoded_tokens
    if latest.is_busy or not 0 <= tokens - latest.tokens <= _TOKENS_AWAY_MAX:
        return None
    return FilledSlot(latest.id_slot, tokens, found.cached_tokens)
