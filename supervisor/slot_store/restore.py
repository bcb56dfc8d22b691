"""Fills the slots of an engine from files with its cache key, each verified just before."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from proxy.prompt_cache.fingerprint import RestoredSlot, decode_fingerprint
from proxy.upstream.slots import SlotState
from supervisor.engine_client import slots
from supervisor.engine_client.client import (
    EngineClient,
    EngineNotConnected,
    EngineUnreachable,
    ErrorResponse,
)
from supervisor.engine_client.slots import SlotFileInfo
from supervisor.flags.plan import Plan
from supervisor.slot_store.first_restore import uses_restored
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import fill_order, to_restore, uses_prompt_similarity
from supervisor.slot_store.quarantine import QuarantinedFile
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotFileMissing, SlotKeyMissing
from supervisor.slot_store.task import SlotTask, SlotTransfer


async def restore(
    task: SlotTask, client: EngineClient, transfer: SlotTransfer
) -> list[RestoredSlot]:
    """Fill slots, the most recently used conversation first; return all slots.

    Raises:
        EngineUnreachable: The engine does not answer.
        OSError, AccessDenied: The disk refused.
    """
    spool = task.spool()
    await task.files.loaded()
    quarantined = await asyncio.to_thread(_quarantine_invalid, task, spool)
    task.files.catalogue.remove(one.name for one in quarantined)
    for file in quarantined:
        task.emit_quarantined(file)
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        return []
    filled = await _fill(task, client, spool, found)
    for manifest in filled.values():
        transfer.add(manifest)
    if filled and needs_refresh(task.plan):
        empty = [id_slot for id_slot in fill_order(found) if id_slot not in filled]
        for id_slot in (*empty[:1], *reversed(filled)):
            await slots.refresh_slot(client, id_slot)
    after = await slots.get_slots(client)
    if isinstance(after, ErrorResponse):
        return []
    return [restored_slot(slot, filled) for slot in after]


async def _fill(
    task: SlotTask, client: EngineClient, spool: Path, found: Sequence[SlotState]
) -> dict[int, Manifest]:
    """Restore the latest conversations; return them by slot. None where the engine uses none."""
    empty, filled = fill_order(found), dict[int, Manifest]()
    restore_one = functools.partial(restore_file, task, client, spool)
    chosen = await asyncio.to_thread(_to_restore, task, found)
    if not await uses_restored(task, client, chosen, empty[0], restore_one):
        return {}
    for manifest in await asyncio.to_thread(_to_restore, task, found):  # some may be invalid
        if await restore_one(manifest, empty[0]):
            filled[empty.pop(0)] = manifest
    return filled


def needs_refresh(plan: Plan) -> bool:
    """Return whether restored slots need an empty request each."""
    # An engine that does not match prompts looks for a conversation in cache-ram if the request
    # names no slot, and not all endpoints take one. It copies idle slots there when another slot is
    # used, so at least two are used; and the slot used last is reused last.
    return plan.slots > 1 and not uses_prompt_similarity(plan)


def restored_slot(slot: SlotState, filled: Mapping[int, Manifest]) -> RestoredSlot:
    manifest = filled.get(slot.id_slot)
    if manifest is None or slot.tokens not in {manifest.tokens, 0}:  # 0: not reported
        return RestoredSlot(slot.id_slot, slot.task)
    fingerprint = decode_fingerprint(manifest.fingerprint)
    return RestoredSlot(slot.id_slot, slot.task, manifest.tokens, fingerprint)


def _quarantine_invalid(task: SlotTask, spool: Path) -> list[QuarantinedFile]:
    # A link in the spool is of a file that an engine crashed on or was stopped over.
    given = {path.name.partition(".")[0] for path in spool.glob("*.slot")}
    found = task.store.quarantine_invalid(task.owner.model)
    for manifest in task.store.saved(task.owner.model):
        if manifest.name in given:
            reason = "the engine that read it did not answer"
        elif not task.key.fits(manifest.identity):
            reason = "it is of another model, build, cache type or option"
        else:
            continue
        found.append(task.store.quarantine_file(manifest, reason))
    for path in spool.iterdir():
        if not task.files.is_pending(path):
            path.unlink(missing_ok=True)
    return found


def _to_restore(task: SlotTask, found: Sequence[SlotState]) -> list[Manifest]:
    return to_restore(
        filter(task.store.content.is_readable, task.store.saved(task.owner.model)),
        task.key,
        replica=(task.owner.replica, task.owner.replicas),
        most=len(found),
        ctx=min(slot.n_ctx for slot in found),
    )


async def restore_file(
    task: SlotTask, client: EngineClient, spool: Path, manifest: Manifest, id_slot: int
) -> SlotFileInfo | None:
    """Fill a slot from a file, verified before; None where that failed.

    Its duration is that of verifying and reading. A file that cannot be used is quarantined, with
    an event, also one that the engine did not survive.

    Raises:
        EngineUnreachable: The engine does not answer.
        OSError, AccessDenied: The disk refused.
    """
    link: Path | None = None
    began_at_s = time.monotonic()
    try:
        link = await asyncio.to_thread(task.store.check_out, manifest, spool, task.key)
        expected = SlotFileInfo(manifest.tokens, link.stat().st_size)
        verified_s = time.monotonic() - began_at_s
        read = await slots.restore(client, id_slot, link.name)
    except (SlotFileMissing, SlotKeyMissing):  # deleted by another program; the settings changed
        task.files.catalogue.remove([manifest.name])
        task.files.start(task.files.reconcile(), "slot files are gone")
        return None
    except InvalidSlotFile as error:
        await _quarantine(task, manifest, str(error))
        return None
    except EngineNotConnected:
        raise
    except EngineUnreachable:
        await _quarantine(task, manifest, "the engine that read it did not answer")
        raise
    finally:
        if link is not None:
            link.unlink(missing_ok=True)
    if isinstance(read, SlotFileInfo) and read == expected:
        return replace(read, duration_s=verified_s + read.duration_s)
    detail = read.message if isinstance(read, ErrorResponse) else f"it read {read.tokens} tokens"
    await _quarantine(task, manifest, f"the engine refused it: {detail}")
    await slots.erase(client, id_slot)
    return None


async def _quarantine(task: SlotTask, manifest: Manifest, reason: str) -> None:
    task.files.catalogue.remove([manifest.name])
    task.emit_quarantined(await asyncio.to_thread(task.store.quarantine_file, manifest, reason))
