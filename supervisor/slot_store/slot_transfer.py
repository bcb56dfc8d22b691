"""Has an engine write its idle slots, and fill its slots from verified files.

Tries whether an engine uses restored slots, once for each cache key. What a build makes of the
slots of a hybrid, recurrent or vision model stands nowhere in its help. So a file is restored
twice: first to ask for its tokens and one more, as a conversation that goes on does, and to see how
many of them the engine finds; then to keep. A file that holds pictures cannot be asked for by its
tokens: there the first response to its conversation shows it.

Source: measured on build 10434: of 1 077 tokens in the slot of a hybrid model it found all, of 790
in that of a model with a sliding window none.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from operator import attrgetter
from pathlib import Path
from typing import Final

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.upstream.engine_state import SlotState
from supervisor.engine import client as client_module
from supervisor.engine.client import (
    EngineClient,
    EngineNotConnected,
    EngineUnreachable,
    ErrorResponse,
    SlotFileInfo,
)
from supervisor.models.metadata import Gguf
from supervisor.plan.plan import Plan
from supervisor.slot_store.file_index import CataloguedFile
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import (
    fill_order,
    to_restore,
    uses_prompt_similarity,
    worth_saving,
)
from supervisor.slot_store.save_limits import SpooledFile
from supervisor.slot_store.slot_file import InvalidSlotFile, SlotFileMissing, SlotKeyMissing
from supervisor.slot_store.slot_files import SlotTask, SlotTransfer
from supervisor.slot_store.store import RestoreOutcome

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
    found = await client_module.get_slots(client)
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
        written = await client_module.save(client, id_slot, spooled.name)
    except BaseException:
        spooled.unlink(missing_ok=True)
        raise
    if isinstance(written, ErrorResponse):
        spooled.unlink(missing_ok=True)
        _report_refusal(task, id_slot, written)
        return None
    text = fingerprint.to_ascii()
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


UNUSED: Final = "its engine used nothing of a restored conversation"
_FAILED: Final = "its engine failed over a restored conversation"
_ENDED: Final = "its engine ended when it used a restored conversation"
# An engine that uses nothing computes all tokens; the shortest file has the fewest.
_TIMEOUT_S: Final = 30.0

RestoreOne = Callable[[Manifest, int], Awaitable[SlotFileInfo | None]]


async def uses_restored(
    task: SlotTask,
    client: EngineClient,
    manifests: Sequence[Manifest],
    id_slot: int,
    restore_one: RestoreOne,
) -> bool:
    """Return whether restored slots are used, as far as that is known; leaves the slot empty.

    Raises:
        EngineUnreachable: The engine does not answer.
    """
    if known := task.store.outcomes.get(task.key):
        return not known.problem
    outcome = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                outcome = await _try_restore(task, client, manifests, id_slot, restore_one)
    except EngineUnreachable:
        outcome = RestoreOutcome(task.owner.model, problem=_ENDED)
        raise
    finally:
        if outcome:
            note_outcome(task, outcome)
    return outcome is None or not outcome.problem


def note_outcome(task: SlotTask, outcome: RestoreOutcome) -> None:
    """Remember what became of the first restored slot, and report a problem."""
    task.store.outcomes.set(task.key, outcome)
    if outcome.problem:
        expected, found = outcome.expected_tokens, outcome.found_tokens
        task.emit("slots.restore_unused", expected=expected, cached=found)


async def _try_restore(
    task: SlotTask,
    client: EngineClient,
    manifests: Sequence[Manifest],
    id_slot: int,
    restore_one: RestoreOne,
) -> RestoreOutcome | None:
    """Try the shortest conversation without pictures; None if there is none."""
    for manifest in sorted(manifests, key=attrgetter("tokens")):
        tokens = await asyncio.to_thread(_text, task, manifest)
        if tokens and await restore_one(manifest, id_slot):
            found = await client_module.cached_tokens(client, id_slot, (*tokens, tokens[-1]))
            await client_module.erase(client, id_slot)
            return _outcome(task.owner.model, len(tokens), found)
    return None


def _outcome(model: str, tokens: int, found: int | ErrorResponse) -> RestoreOutcome | None:
    if not isinstance(found, ErrorResponse):
        return RestoreOutcome(model, tokens, found, "" if found else UNUSED)
    if found.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return None  # the request was wrong or too long, or the build reports no figures
    return RestoreOutcome(model, tokens, 0, f"{_FAILED}: {found.message}")


def _text(task: SlotTask, manifest: Manifest) -> tuple[int, ...]:
    """Return the tokens of a file; none if it is invalid or holds pictures."""
    try:
        header = task.store.header(manifest)
    except InvalidSlotFile:  # found again when it is restored
        return ()
    return () if header.media else header.tokens


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
    found = await client_module.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        return []
    filled = await _fill(task, client, spool, found)
    for entry in filled.values():
        transfer.add(entry.manifest)
    if filled and needs_refresh(task.plan):
        empty = [id_slot for id_slot in fill_order(found) if id_slot not in filled]
        for id_slot in (*empty[:1], *reversed(filled)):
            await client_module.refresh_slot(client, id_slot)
    after = await client_module.get_slots(client)
    if isinstance(after, ErrorResponse):
        return []
    return [restored_slot(slot, filled) for slot in after]


async def _fill(
    task: SlotTask, client: EngineClient, spool: Path, found: Sequence[SlotState]
) -> dict[int, CataloguedFile]:
    """Restore the latest conversations; return them by slot. None where the engine uses none."""
    empty, filled = fill_order(found), dict[int, CataloguedFile]()
    restore_one = functools.partial(restore_file, task, client, spool)
    chosen = [entry.manifest for entry in _to_restore(task, found)]
    if not await uses_restored(task, client, chosen, empty[0], restore_one):
        return {}
    for entry in _to_restore(task, found):  # some may be invalid
        try:
            is_filled = await restore_one(entry.manifest, empty[0])
        except OSError as error:  # a full spool, which may have room for the next
            task.emit_restore_failed(error)
            continue
        if is_filled:
            filled[empty.pop(0)] = entry
    return filled


def needs_refresh(plan: Plan) -> bool:
    """Return whether restored slots need an empty request each."""
    # An engine that does not match prompts looks for a conversation in cache-ram if the request
    # names no slot, and not all endpoints take one. It copies idle slots there when another slot is
    # used, so at least two are used; and the slot used last is reused last.
    return plan.slots > 1 and not uses_prompt_similarity(plan)


def restored_slot(slot: SlotState, filled: Mapping[int, CataloguedFile]) -> RestoredSlot:
    entry = filled.get(slot.id_slot)
    if entry is None or slot.tokens not in {entry.file.tokens, 0}:  # 0: not reported
        return RestoredSlot(slot.id_slot, slot.task)
    return RestoredSlot(slot.id_slot, slot.task, entry.file.tokens, entry.file.fingerprint)


async def _empty_spool(task: SlotTask, spool: Path) -> None:
    """Quarantine the files that an engine crashed on or was stopped over: their links are left."""
    paths = await asyncio.to_thread(_paths, spool)
    left = [path for path in paths if path not in task.files.pending]
    for name in {path.name.partition(".")[0] for path in left if path.suffix == ".slot"}:
        if entry := task.files.catalogue.get(name):
            await _quarantine(task, entry.manifest, "the engine that read it did not answer")
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
        read = await client_module.restore(client, id_slot, link.name)
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
    await client_module.erase(client, id_slot)
    return None


async def _quarantine(task: SlotTask, manifest: Manifest, reason: str) -> None:
    task.files.catalogue.remove([manifest.name])
    task.emit_quarantined(await asyncio.to_thread(task.store.quarantine_file, manifest, reason))
