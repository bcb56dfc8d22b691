"""Whether an engine uses what it was given back. Pure but for `read_back`.

The first answer in a slot that was filled says how many tokens the engine had. Few may mean that it
did not use them, or that the prompt was put otherwise than before (templates tell the date): so the
tokens that the slot holds now are compared with those it was filled with.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.slot_store import slot_file
from supervisor.slot_store.slot_file import SlotFileHeader
from supervisor.slot_store.task import SlotTask


@dataclass(frozen=True, slots=True)
class CacheObservation:
    """What the first answer in a slot that was filled says.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Those of them that the engine had.
    """

    prompt_tokens: int
    cached_tokens: int


def is_doubtful(filled: int, had: CacheObservation) -> bool:
    """Return whether an engine had few of the tokens of a prompt that it was filled with."""
    return 2 * had.cached_tokens < min(filled, had.prompt_tokens)


def is_unused(shared: int, had: CacheObservation, tokens_min: int) -> bool:
    """Return whether an engine computed anew what it was filled with.

    Args:
        shared: Tokens that what the slot holds has in common with what it was filled with; an
            answer that is given again is among them.
        had: What the answer says.
        tokens_min: Fewer tell nothing.
    """
    return min(shared, had.prompt_tokens) >= tokens_min and is_doubtful(shared, had)


async def read_back(job: SlotTask, client: EngineClient, id_slot: int) -> SlotFileHeader | None:
    """Return what a slot holds now, written into the spool for that; None where it is refused.

    Raises:
        EngineUnreachable: The engine does not answer.
        NotASlotFile: It wrote something else.
        OSError, AccessDenied: The disk refused.
    """
    spooled = job.spool() / f"{secrets.token_hex(8)}.new"
    try:
        moved = await slots.save(client, id_slot, spooled.name)
        if isinstance(moved, ErrorResponse):
            return None
        return await asyncio.to_thread(slot_file.read, spooled)
    finally:
        spooled.unlink(missing_ok=True)
