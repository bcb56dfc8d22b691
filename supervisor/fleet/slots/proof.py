"""Whether an engine uses what it was given back. Pure but for `held`.

The first answer in a slot that was filled says how many tokens the engine had. Few may mean that it
did not use them, or that the prompt was put otherwise than before (templates tell the date): so the
tokens that the slot holds now are compared with those it was filled with.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from supervisor.fleet.slots import header
from supervisor.fleet.slots.header import Head
from supervisor.fleet.slots.job import Job
from supervisor.life import slots
from supervisor.life.llama import Llama, Refused


@dataclass(frozen=True, slots=True)
class Had:
    """What the first answer in a slot that was filled says.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Those of them that the engine had.
    """

    prompt_tokens: int
    cached_tokens: int


def is_doubtful(filled: int, had: Had) -> bool:
    """Return whether an engine had few of the tokens of a prompt that it was filled with."""
    return 2 * had.cached_tokens < min(filled, had.prompt_tokens)


def is_disproved(shared: int, had: Had, tokens_min: int) -> bool:
    """Return whether an engine computed anew what it was filled with.

    Args:
        shared: Tokens that what the slot holds has in common with what it was filled with; an
            answer that is given again is among them.
        had: What the answer says.
        tokens_min: Fewer tell nothing.
    """
    return min(shared, had.prompt_tokens) >= tokens_min and is_doubtful(shared, had)


async def held(job: Job, llama: Llama, id_slot: int) -> Head | None:
    """Return what a slot holds now, written into the spool for that; None where it is refused.

    Raises:
        EngineSilent: The engine does not answer.
        NoSlotFile: It wrote something else.
        OSError, StateDenied: The disk refused.
    """
    spooled = job.spool() / f"{secrets.token_hex(8)}.new"
    try:
        moved = await slots.save(llama, id_slot, spooled.name)
        if isinstance(moved, Refused):
            return None
        return await asyncio.to_thread(header.read, spooled)
    finally:
        spooled.unlink(missing_ok=True)
