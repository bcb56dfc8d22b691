"""Has an engine write its idle slots, verifies the files, and stores them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final

from proxy.upstream.slots import SlotState
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.gguf.metadata import Gguf
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.outcomes import RestoreOutcome
from supervisor.slot_store.policy import worth_saving
from supervisor.slot_store.task import SlotTask, SlotTransfer

# Left free on the disk, whatever the budget.
_RESERVE_BYTES: Final = 256 * 1024**2
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

    Raises:
        EngineUnreachable: The engine does not answer.
        InvalidSlotFile: It wrote something else than it reported.
        OSError, AccessDenied: The disk refused.
    """
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse):
        return
    fingerprints, now = task.fingerprints(found), datetime.now(tz=UTC)
    for rank, slot in enumerate(_worth_saving(task, found, saved_tasks)):
        used_at = now - timedelta(milliseconds=rank)
        fingerprint = fingerprints.get(slot.id_slot, "")
        if manifest := await _save_one(task, client, slot, fingerprint, used_at):
            transfer.add(manifest)
        saved_tasks[slot.id_slot] = slot.task


def _worth_saving(
    task: SlotTask, found: tuple[SlotState, ...], saved_tasks: Mapping[int, int | None]
) -> list[SlotState]:
    task.spool()  # the disk whose free space counts
    room_bytes = task.store.room_bytes() - _RESERVE_BYTES
    token_bytes, state_bytes = _token_bytes(task.plan.gguf), task.key.state_bytes or 0
    return worth_saving(found, saved_tasks, task.budget, token_bytes, room_bytes, state_bytes)


def _token_bytes(gguf: Gguf) -> int:
    # A cache is rarely wider than f16.
    values = sum(gguf.kv_heads) * (gguf.key_length + gguf.value_length)
    return 2 * values + _TOKEN_EXTRA_BYTES


def _report_refusal(task: SlotTask, id_slot: int, refused: ErrorResponse) -> None:
    detail = refused.message or str(refused.status)
    task.emit("slots.save_failed", run=task.run, reason=f"slot {id_slot}: {detail}")
    if refused.status == HTTPStatus.NOT_IMPLEMENTED:  # older builds, of a model with pictures
        problem = f"its engine does not save them: {detail}"
        task.store.outcomes.set(task.key, RestoreOutcome(task.owner.model, problem=problem))


async def _save_one(
    task: SlotTask, client: EngineClient, slot: SlotState, fingerprint: str, used_at: datetime
) -> Manifest | None:
    """Save one slot; None if it is redundant or the engine refused."""
    spooled = task.spool() / f"{secrets.token_hex(8)}.new"
    try:
        written = await slots.save(client, slot.id_slot, spooled.name)
        if isinstance(written, ErrorResponse):
            _report_refusal(task, slot.id_slot, written)
            return None
        unverified = Manifest(
            name=spooled.stem,
            model=task.owner.model,
            replica=task.owner.replica,
            identity=task.key,
            size_bytes=written.size_bytes,
            sha256="",
            tokens=written.tokens,
            tokens_sha256="",
            ctx_slot=slot.n_ctx,
            fingerprint=fingerprint if len(fingerprint) <= _FINGERPRINT_MAX_CHARACTERS else "",
            saved_at=datetime.now(tz=UTC),
            used_at=used_at,
        )
        return await asyncio.to_thread(task.store.add, spooled, unverified, task.budget)
    finally:
        spooled.unlink(missing_ok=True)
