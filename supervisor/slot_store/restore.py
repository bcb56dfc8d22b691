"""Fills the slots of an engine from files that belong to it, each verified just before."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.upstream.slots import SlotState
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.engine_client.slots import SlotFileInfo
from supervisor.flags.plan import Plan
from supervisor.slot_store.file_check import InvalidSlotFile, QuarantinedFile
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import fill_order, to_restore
from supervisor.slot_store.support import uses_prompt_similarity
from supervisor.slot_store.task import SlotTask, SlotTransfer


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot as a run begins with it.

    Attributes:
        id_slot: Which.
        task: Its latest request; -1 while it had none.
        kept: What was put into it; None for nothing.
    """

    id_slot: int
    task: int = -1
    kept: Manifest | None = None


async def restore(job: SlotTask, client: EngineClient, tally: SlotTransfer) -> list[RestoredSlot]:
    """Fill slots with what was saved, the most recently used first.

    Args:
        job: Whose, and where from.
        client: The engine, which serves nobody yet.
        tally: What was done is added to it as it is done.

    Returns:
        All slots as they are then.

    Raises:
        EngineUnreachable: The engine does not answer.
        OSError, AccessDenied: The disk refused.
    """
    spool = job.spool()
    for rejected in await asyncio.to_thread(_quarantine_invalid, job, spool):
        job.quarantined(rejected)
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        return []
    empty, put = fill_order(found), dict[int, Manifest]()
    for one in await asyncio.to_thread(_chosen, job, found):
        if await _restore_one(job, client, spool, one, empty[0]):
            put[empty.pop(0)] = one
            tally.add(one)
    if put and needs_refresh(job.plan):
        for id_slot in (*empty[:1], *reversed(put)):
            await slots.refresh_slot(client, id_slot)
    after = await slots.get_slots(client)
    return [] if isinstance(after, ErrorResponse) else [restored_slot(slot, put) for slot in after]


def needs_refresh(plan: Plan) -> bool:
    """Return whether slots are used once for nothing after they were filled.

    An engine that does not match prompts looks for a conversation in its cache-ram where a request
    names no slot, and some pages take no number. Idle slots are put there whenever another is
    used, so two are used at least; and who was used last is given away last.
    """
    return plan.slots > 1 and not uses_prompt_similarity(plan)


def restored_slot(slot: SlotState, put: Mapping[int, Manifest]) -> RestoredSlot:
    """Return what a slot holds, when all is done."""
    kept = put.get(slot.id_slot)
    is_there = kept is not None and slot.tokens in {kept.tokens, 0}  # 0: it does not tell
    return RestoredSlot(slot.id_slot, slot.task, kept if is_there else None)


def _quarantine_invalid(job: SlotTask, spool: Path) -> list[QuarantinedFile]:
    """Move aside what is not for this engine, and empty its spool.

    A link that is still there is of a file that an engine was handed and did not survive, or was
    stopped over: it is not tried again.
    """
    handed = {path.stem for path in spool.glob("*.slot")}
    rejected = job.store.quarantine_invalid(job.owner.model)
    for one in job.store.saved(job.owner.model):
        if one.name in handed:
            rejected.append(
                job.store.quarantine_file(one, "the engine that was handed it did not answer")
            )
        elif one.identity != job.identity:
            rejected.append(
                job.store.quarantine_file(
                    one, "it is of another model, build, cache type or option"
                )
            )
    for path in spool.iterdir():
        path.unlink(missing_ok=True)
    return rejected


def _chosen(job: SlotTask, found: Sequence[SlotState]) -> list[Manifest]:
    return to_restore(
        job.store.saved(job.owner.model),
        job.identity,
        replica=(job.owner.replica, job.owner.replicas),
        most=len(found),
        ctx=min(slot.n_ctx for slot in found),
    )


async def _restore_one(
    job: SlotTask, client: EngineClient, spool: Path, one: Manifest, id_slot: int
) -> bool:
    """Fill one slot; a file that is not what it should be, or is not taken, is moved aside."""
    try:
        link = await asyncio.to_thread(job.store.check_out, one, spool)
    except InvalidSlotFile as reason:
        job.quarantined(job.store.quarantine_file(one, str(reason)))
        return False
    moved = await slots.restore(client, id_slot, link.name)
    link.unlink()
    if moved == SlotFileInfo(one.tokens, one.size_bytes):
        return True
    said = moved.message if isinstance(moved, ErrorResponse) else f"it took {moved.tokens} tokens"
    job.quarantined(job.store.quarantine_file(one, f"the engine did not take it: {said}"))
    await slots.erase(client, id_slot)
    return False
