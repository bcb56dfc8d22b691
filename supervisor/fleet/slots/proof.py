"""Whether an engine uses what it was given back. Pure but for `held`.

The first answer in a slot that was filled says how many tokens the engine had. Few may mean that it
did not use them, or that the prompt was put otherwise than before (templates tell the date): so the
tokens that the slot holds now are compared with those it was filled with.
"""

from __future__ import annotations

import asyncio
import secrets

from supervisor.fleet.slots import header
from supervisor.fleet.slots.header import Head
from supervisor.fleet.slots.job import Job
from supervisor.life import slots
from supervisor.life.llama import Llama, Refused


def is_doubtful(filled: int, cached: int) -> bool:
    """Return whether an engine had few of the tokens that it was filled with."""
    return 2 * cached < filled


def is_disproved(shared: int, cached: int, tokens_min: int) -> bool:
    """Return whether an engine computed anew what it was filled with.

    Args:
        shared: Tokens that the prompt had in common with what was restored.
        cached: Tokens of it that the engine had.
        tokens_min: Fewer tell nothing.
    """
    return shared >= tokens_min and is_doubtful(shared, cached)


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
