"""Saves one idle slot of a serving engine, and fills one from a file.

The engine decodes nothing while it writes or reads, so it is asked for nothing else, and what it
wrote is stored afterwards. A failure fails no request: it is logged, once.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.slot_files.storage import Transfer
from supervisor.engine_client.client import EngineClient, EngineUnreachable
from supervisor.errors import AccessDenied
from supervisor.slot_store.catalogue import TOKENS_AWAY_MAX
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.restore import restore_file
from supervisor.slot_store.save import write
from supervisor.slot_store.task import SlotTask


async def save_one(
    task: SlotTask,
    client: EngineClient,
    id_slot: int,
    tokens: int,
    fingerprint: ConversationFingerprint,
) -> Transfer | None:
    """Have the engine write a slot of `tokens`, or up to 2 fewer; store it in the background."""
    try:
        spooled = await write(task, client, id_slot, fingerprint, datetime.now(tz=UTC))
    except EngineUnreachable as error:
        task.emit_failed(str(error))
        return None
    except (OSError, AccessDenied) as error:
        task.pause_saving(str(error))
        return None
    if spooled is None:
        return None
    written = spooled.unverified
    if not 0 <= tokens - written.tokens <= TOKENS_AWAY_MAX:
        spooled.path.unlink(missing_ok=True)  # another conversation has the slot
        return None
    task.files.store(spooled, task.pause_saving)
    return Transfer(written.tokens, written.size_bytes, spooled.duration_s)


async def restore_one(
    task: SlotTask, client: EngineClient, id_slot: int, name: str
) -> Transfer | None:
    """Fill a slot from a file; a file that cannot be used is removed from the catalogue."""
    found = task.files.catalogue.get(name)
    is_paused = task.files.restore_pause.is_on
    if found is None or is_paused or not _fits(task, found.manifest):
        return None
    try:
        read = await restore_file(task, client, task.spool(), found.manifest, id_slot)
    except EngineUnreachable as error:
        if task.files.catalogue.get(name):  # else its quarantine is reported
            task.emit_restore_failed(error)
        return None
    except (OSError, AccessDenied) as error:
        if task.files.restore_pause.begin():
            task.emit_restore_failed(error)
        return None
    task.files.restore_pause.end()
    if read is None:
        return None
    now = datetime.now(tz=UTC)
    task.files.catalogue.note_use(name, now)
    task.files.start(asyncio.to_thread(task.store.mark_used, found.manifest, now), f"use {name}")
    return Transfer(read.tokens, read.size_bytes, read.duration_s)


def _fits(task: SlotTask, manifest: Manifest) -> bool:
    has_room = not task.ctx_slot or manifest.tokens < task.ctx_slot
    return has_room and manifest.model == task.owner.model and task.key.fits(manifest.identity)
