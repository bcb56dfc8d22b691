"""Warms an engine up before anybody waits for it.

The first token after loading is slow: pages of the model are read in, threads and kernels are made.
One token of a prompt nobody sent takes that on itself.
"""

from __future__ import annotations

from enum import StrEnum

from supervisor.life.llama import EngineSilent, Llama


class Warmth(StrEnum):
    """How a warm-up ended."""

    WARM = "warm"
    NOTHING_TO_WARM = "nothing to warm"
    SICK = "sick"


async def warm(llama: Llama) -> Warmth:
    """Have one token made.

    An engine for embeddings or reranking refuses that with 4xx or 501: there is nothing to warm
    then, and it is as ready as it gets. Any other refusal, or none at all, is a bad sign.
    """
    try:
        refused = await llama.one_token()
    except EngineSilent:
        return Warmth.SICK
    if refused is None:
        return Warmth.WARM
    can_serve = 400 <= refused.status < 500 or refused.status == 501
    return Warmth.NOTHING_TO_WARM if can_serve else Warmth.SICK
