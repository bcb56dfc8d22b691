"""Fills the slots of an engine from files that belong to it, each verified just before."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from supervisor.fleet.slots.check import Rejected, Unfit
from supervisor.fleet.slots.job import Job, Tally
from supervisor.fleet.slots.manifest import Manifest
from supervisor.fleet.slots.worth import seats, to_restore
from supervisor.life import slots
from supervisor.life.llama import Llama, Refused
from supervisor.life.slots import Moved, Slot


async def restore(job: Job, llama: Llama, tally: Tally) -> dict[int, int | None]:
    """Fill slots with what was saved, the most recently used first.

    Args:
        job: Whose, and where from.
        llama: The engine, which serves nobody yet.
        tally: What was done is added to it as it is done.

    Returns:
        For each slot the request that was its latest: while that stays so, there is nothing new in
        it to be saved.

    Raises:
        EngineSilent: The engine does not answer.
        OSError, StateDenied: The disk refused.
    """
    spool = job.spool()
    for rejected in await asyncio.to_thread(_weed, job, spool):
        job.rejected(rejected)
    found = await slots.look(llama)
    if isinstance(found, Refused) or not found:
        return {}
    empty = seats(found)
    for one in await asyncio.to_thread(_chosen, job, found):
        if await _restore_one(job, llama, spool, one, empty[0]):
            empty.pop(0)
            tally.add(one)
    if tally.slots:
        # An engine that does not match prompts looks for them in its cache-ram, where idle slots
        # are put whenever a request begins.
        await llama.one_token()
    after = await slots.look(llama)
    return {} if isinstance(after, Refused) else {one.id_slot: one.id_task for one in after}


def _weed(job: Job, spool: Path) -> list[Rejected]:
    """Move aside what is not for this engine, and empty its spool.

    A link that is still there is of a file that an engine was handed and did not survive, or was
    stopped over: it is not tried again.
    """
    handed = {path.stem for path in spool.glob("*.slot")}
    rejected = job.shelf.weed(job.owner.model)
    for one in job.shelf.kept(job.owner.model):
        if one.name in handed:
            rejected.append(job.shelf.reject(one, "the engine that was handed it did not answer"))
        elif one.identity != job.identity:
            rejected.append(
                job.shelf.reject(one, "it is of another model, build, cache type or option")
            )
    for path in spool.iterdir():
        path.unlink(missing_ok=True)
    return rejected


def _chosen(job: Job, found: Sequence[Slot]) -> list[Manifest]:
    return to_restore(
        job.shelf.kept(job.owner.model),
        job.identity,
        replica=(job.owner.replica, job.owner.replicas),
        most=len(found),
        ctx=min(slot.n_ctx for slot in found),
    )


async def _restore_one(job: Job, llama: Llama, spool: Path, one: Manifest, id_slot: int) -> bool:
    """Fill one slot; a file that is not what it should be, or is not taken, is moved aside."""
    try:
        link = await asyncio.to_thread(job.shelf.lend, one, spool)
    except Unfit as why:
        job.rejected(job.shelf.reject(one, str(why)))
        return False
    moved = await slots.restore(llama, id_slot, link.name)
    link.unlink()
    if moved == Moved(one.tokens, one.size_bytes):
        return True
    said = moved.message if isinstance(moved, Refused) else f"it took {moved.tokens} tokens"
    job.rejected(job.shelf.reject(one, f"the engine did not take it: {said}"))
    await slots.erase(llama, id_slot)
    return False
