"""Has an engine write its idle slots, verifies the files, and stores them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.upstream.slots import SlotState
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.gguf.metadata import Gguf
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.outcomes import RestoreOutcome
from supervisor.slot_store.pending_files import SpooledFile
from supervisor.slot_store.policy import worth_saving
from supervisor.slot_store.task import SlotTask, SlotTransfer

# The size of a token in a file beside its keys and values, generously.
_TOKEN_EXTRA_BYTES: Final = 64
# The fingerprint of a prompt of half a million bytes has some 90,000 characters.
_FINGERPRINT_MAX_CHARACTERS: Final = 128 * 1024


async def save(
    task: SlotTask,
    client: EngineClient,
    saved_tasks: dict[int, int | None],
    transfer: SlotTransfer,
) -> None:
    """Save the idle slots, the most recently used first; update `saved_tasks` and `transfer`.

    Returns when all are stored, also those that were written before.

    Raises:
        EngineUnreachable: The engine does not answer.
        OSError, AccessDenied: The disk refused.
    """
    await task.files.loaded()
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse):
        return
    fingerprints, now = task.fingerprints(found), datetime.now(tz=UTC)
    for rank, slot in enumerate(_worth_saving(task, found, saved_tasks)):
        fingerprint = fingerprints.get(slot.id_slot, ConversationFingerprint())
        if not task.files.catalogue.holds(task.key_digest, slot.tokens, fingerprint):
            used_at = now - timedelta(milliseconds=rank)
            await _save(task, client, slot.id_slot, fingerprint, used_at, transfer)
        saved_tasks[slot.id_slot] = slot.task
    await task.files.settle(task.owner.instance)


async def _save(
    task: SlotTask,
    client: EngineClient,
    id_slot: int,
    fingerprint: ConversationFingerprint,
    used_at: datetime,
    transfer: SlotTransfer,
) -> None:
    spooled = await write(task, client, id_slot, fingerprint, used_at)
    storing = task.files.store(spooled, task.pause_saving) if spooled else None
    if storing and (manifest := await asyncio.shield(storing)):
        transfer.add(manifest)


def _worth_saving(
    task: SlotTask, found: tuple[SlotState, ...], saved_tasks: Mapping[int, int | None]
) -> list[SlotState]:
    task.spool()  # the disk whose free space counts
    room_bytes = task.store.room_bytes()
    token_bytes, state_bytes = _token_bytes(task.plan.gguf), task.key.state_bytes or 0
    return worth_saving(found, saved_tasks, task.budget, token_bytes, room_bytes, state_bytes)


def _token_bytes(gguf: Gguf) -> int:
    # A cache is rarely wider than f16.
    values = sum(gguf.kv_heads) * (gguf.key_length + gguf.value_length)
    return 2 * values + _TOKEN_EXTRA_BYTES


def _report_refusal(task: SlotTask, id_slot: int, refused: ErrorResponse) -> None:
    detail = refused.message or str(refused.status)
    task.pause_saving(f"slot {id_slot}: {detail}")
    if refused.status == HTTPStatus.NOT_IMPLEMENTED:  # older builds, of a model with pictures
        problem = f"its engine does not save them: {detail}"
        task.store.outcomes.set(task.key, RestoreOutcome(task.owner.model, problem=problem))


async def write(
    task: SlotTask,
    client: EngineClient,
    id_slot: int,
    fingerprint: ConversationFingerprint,
    used_at: datetime,
) -> SpooledFile | None:
    """Have the engine write a slot; None if it refused.

    Raises:
        EngineUnreachable: The engine does not answer.
        OSError, AccessDenied: There is no spool directory.
    """
    spooled = task.spool() / f"{secrets.token_hex(8)}.new"
    try:
        written = await slots.save(client, id_slot, spooled.name)
    except BaseException:
        spooled.unlink(missing_ok=True)
        raise
    if isinstance(written, ErrorResponse):
        spooled.unlink(missing_ok=True)
        _report_refusal(task, id_slot, written)
        return None
    text = fingerprint.encoded
    manifest = Manifest(
        name=spooled.stem,
        model=task.owner.model,
        replica=task.owner.replica,
        identity=task.key,
        size_bytes=written.size_bytes,
        sha256="",
        tokens=written.tokens,
        tokens_sha256="",
        ctx_slot=task.ctx_slot,
        fingerprint=text if len(text) <= _FINGERPRINT_MAX_CHARACTERS else "",
        saved_at=datetime.now(tz=UTC),
        used_at=used_at,
    )
    return SpooledFile(spooled, manifest, written.duration_s, task.store, task.budget)
