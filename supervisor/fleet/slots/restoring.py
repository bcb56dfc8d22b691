"""Fills the slots of an engine from files that belong to it, each verified just before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from supervisor.fleet.slots.check import Rejected, Unfit
from supervisor.fleet.slots.job import Job, Tally
from supervisor.fleet.slots.manifest import Manifest
from supervisor.fleet.slots.reason import is_matched
from supervisor.fleet.slots.worth import seats, to_restore
from supervisor.life import slots
from supervisor.life.llama import Llama, Refused
from supervisor.life.slots import Moved, Slot
from supervisor.profile.plan import Plan


@dataclass(frozen=True, slots=True)
class Filled:
    """A slot as a run begins with it.

    Attributes:
        id_slot: Which.
        id_task: Its latest request; None while it had none.
        kept: What was put into it; None for nothing.
    """

    id_slot: int
    id_task: int | None = None
    kept: Manifest | None = None


async def restore(job: Job, llama: Llama, tally: Tally) -> list[Filled]:
    """Fill slots with what was saved, the most recently used first.

    Args:
        job: Whose, and where from.
        llama: The engine, which serves nobody yet.
        tally: What was done is added to it as it is done.

    Returns:
        All slots as they are then.

    Raises:
        EngineSilent: The engine does not answer.
        OSError, StateDenied: The disk refused.
    """
    spool = job.spool()
    for rejected in await asyncio.to_thread(_weed, job, spool):
        job.rejected(rejected)
    found = await slots.look(llama)
    if isinstance(found, Refused) or not found:
        return []
    empty, put = seats(found), dict[int, Manifest]()
    for one in await asyncio.to_thread(_chosen, job, found):
        if await _restore_one(job, llama, spool, one, empty[0]):
            put[empty.pop(0)] = one
            tally.add(one)
    if put and is_touched(job.plan):
        for id_slot in (*empty[:1], *reversed(put)):
            await slots.touch(llama, id_slot)
    after = await slots.look(llama)
    return [] if isinstance(after, Refused) else [filled(slot, put) for slot in after]


def is_touched(plan: Plan) -> bool:
    """Return whether slots are used once for nothing after they were filled.

    An engine that does not match prompts looks for a conversation in its cache-ram where a request
    names no slot, and some pages take no number. Idle slots are put there whenever another is
    used, so two are used at least; and who was used last is given away last.
    """
    return plan.slots > 1 and not is_matched(plan)


def filled(slot: Slot, put: Mapping[int, Manifest]) -> Filled:
    """Return what a slot holds, when all is done."""
    kept = put.get(slot.id_slot)
    is_there = kept is not None and slot.tokens in {kept.tokens, 0}  # 0: it does not tell
    return Filled(slot.id_slot, slot.id_task, kept if is_there else None)


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
