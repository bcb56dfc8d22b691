"""Fills the slots of an engine from files with its cache key, each verified just before."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from proxy.prompt_cache.fingerprint import RestoredSlot
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
from supervisor.slot_store.catalogue import CataloguedFile
from supervisor.slot_store.first_restore import uses_restored
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import fill_order, to_restore, uses_prompt_similarity
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
    await _empty_spool(task, spool)
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        return []
    filled = await _fill(task, client, spool, found)
    for one in filled.values():
        transfer.add(one.manifest)
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
) -> dict[int, CataloguedFile]:
    """Restore the latest conversations; return them by slot. None where the engine uses none."""
    empty, filled = fill_order(found), dict[int, CataloguedFile]()
    restore_one = functools.partial(restore_file, task, client, spool)
    chosen = [one.manifest for one in _to_restore(task, found)]
    if not await uses_restored(task, client, chosen, empty[0], restore_one):
        return {}
    for one in _to_restore(task, found):  # some may be invalid
        try:
            is_filled = await restore_one(one.manifest, empty[0])
        except OSError as error:  # a full spool, which may have room for the next
            task.emit_restore_failed(error)
            continue
        if is_filled:
            filled[empty.pop(0)] = one
    return filled


def needs_refresh(plan: Plan) -> bool:
    """Return whether restored slots need an empty request each."""
    # An engine that does not match prompts looks for a conversation in cache-ram if the request
    # names no slot, and not all endpoints take one. It copies idle slots there when another slot is
    # used, so at least two are used; and the slot used last is reused last.
    return plan.slots > 1 and not uses_prompt_similarity(plan)


def restored_slot(slot: SlotState, filled: Mapping[int, CataloguedFile]) -> RestoredSlot:
    one = filled.get(slot.id_slot)
    if one is None or slot.tokens not in {one.file.tokens, 0}:  # 0: not reported
        return RestoredSlot(slot.id_slot, slot.task)
    return RestoredSlot(slot.id_slot, slot.task, one.file.tokens, one.file.fingerprint)


async def _empty_spool(task: SlotTask, spool: Path) -> None:
    """Quarantine the files that an engine crashed on or was stopped over: their links are left."""
    paths = await asyncio.to_thread(_paths, spool)
    left = [path for path in paths if path not in task.files.pending]
    for name in {path.name.partition(".")[0] for path in left if path.suffix == ".slot"}:
        if one := task.files.catalogue.get(name):
            await _quarantine(task, one.manifest, "the engine that read it did not answer")
    for path in left:
        path.unlink(missing_ok=True)


def _paths(directory: Path) -> list[Path]:
    return list(directory.iterdir())


def _to_restore(task: SlotTask, found: Sequence[SlotState]) -> list[CataloguedFile]:
    return to_restore(
        task.files.catalogue.files(),
        task.key_digest,
        replica=(task.owner.replica, task.owner.replicas),
        most=len(found),
        ctx=min(slot.n_ctx for slot in found),
        is_elsewhere=task.is_elsewhere,
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
