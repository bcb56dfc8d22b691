"""Has an engine write what its idle slots hold, verifies what was written, and keeps it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from proxy.upstream.slots import SlotState
from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.gguf.metadata import Gguf
from supervisor.slot_store.manifest import Manifest, SlotOrigin
from supervisor.slot_store.policy import worth_saving
from supervisor.slot_store.task import SlotTask, SlotTransfer

# What is left free on the disk, whatever we may take.
_RESERVE_BYTES: Final = 256 * 1024**2
# What a token takes in a file beside its keys and values, generously.
_TOKEN_EXTRA_BYTES: Final = 64


async def save(
    job: SlotTask, client: EngineClient, known: dict[int, int | None], tally: SlotTransfer
) -> None:
    """Save what idle slots hold, the most recently used first.

    Args:
        job: Whose, and where to.
        client: The engine.
        known: Of the slots whose content is saved already, the request that was the latest then;
            what is saved now is entered.
        tally: What was done is added to it as it is done.

    Raises:
        EngineUnreachable: The engine does not answer.
        Unfit: It wrote something else than it says.
        OSError, AccessDenied: The disk refused.
    """
    found = await slots.get_slots(client)
    if isinstance(found, ErrorResponse):
        return
    fingerprints, now = job.fingerprints(found), datetime.now(tz=UTC)
    for rank, slot in enumerate(_worth_saving(job, found, known)):
        used_at = now - timedelta(milliseconds=rank)
        label = _label(job, slot, fingerprints.get(slot.id_slot, ""), used_at)
        if saved := await _save_one(job, client, slot, label):
            tally.add(saved)
        known[slot.id_slot] = slot.task


def _worth_saving(
    job: SlotTask, found: tuple[SlotState, ...], known: Mapping[int, int | None]
) -> list[SlotState]:
    a_token = _token_bytes(job.plan.gguf)
    job.spool()  # of which disk we ask
    room_bytes = job.store.room_bytes() - _RESERVE_BYTES
    return worth_saving(found, known, job.budget, a_token, room_bytes)


def _token_bytes(gguf: Gguf) -> int:
    """Return what a token takes in a file at most; a cache is rarely wider than f16."""
    values = sum(gguf.kv_heads) * (gguf.key_length + gguf.value_length)
    return 2 * values + _TOKEN_EXTRA_BYTES


async def _save_one(
    job: SlotTask, client: EngineClient, slot: SlotState, label: SlotOrigin
) -> Manifest | None:
    """Save one slot; None where it would add nothing to what is kept, or was refused."""
    spooled = job.spool() / f"{secrets.token_hex(8)}.new"
    try:
        moved = await slots.save(client, slot.id_slot, spooled.name)
        if isinstance(moved, ErrorResponse):
            job.save_failed(f"slot {slot.id_slot}: {moved.message or moved.status}")
            return None
        return await asyncio.to_thread(job.store.add, spooled, label, moved, job.budget)
    finally:
        spooled.unlink(missing_ok=True)


def _label(job: SlotTask, slot: SlotState, fingerprint: str, used_at: datetime) -> SlotOrigin:
    return SlotOrigin(
        model=job.owner.model,
        replica=job.owner.replica,
        identity=job.identity,
        ctx_slot=slot.n_ctx,
        fingerprint=fingerprint,
        saved_at=datetime.now(tz=UTC),
        used_at=used_at,
    )
