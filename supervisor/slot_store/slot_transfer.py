"""Has an engine write its idle slots, and fill its slots from verified files.

Tests once per cache key whether the engine uses restored slots, because no help text says so for
the slots of a hybrid, recurrent or vision model. A file is restored twice: first to request its
tokens and one more, as a continued conversation does, and to count how many of them the engine
finds; then to keep. A file with pictures cannot be tested with tokens: there the first response to
its conversation shows it.

Source: measured on build 10434: of 1 077 tokens in the slot of a hybrid model it found all, of 790
in that of a model with a sliding window none.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from operator import attrgetter
from pathlib import Path
from typing import Final

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.upstream.engine_state import SlotState
from supervisor.builds.help import has_draft_cache
from supervisor.engine import client as client_module
from supervisor.engine.client import (
    EngineClient,
    EngineNotConnected,
    EngineUnreachable,
    ErrorResponse,
    SlotFileInfo,
)
from supervisor.plan.plan import Plan
from supervisor.slot_store import policy
from supervisor.slot_store.file_index import CataloguedFile, is_prefix
from supervisor.slot_store.manifest import CacheKey, Manifest
from supervisor.slot_store.save_limits import SpooledFile
from supervisor.slot_store.slot_file import (
    InvalidSlotFile,
    ReadGivenUp,
    SlotFileMissing,
    SlotKeyMissing,
)
from supervisor.slot_store.slot_files import SlotTask
from supervisor.slot_store.store import RestoreOutcome, SlotStore

# An upper bound of the size of a token in a file without its keys and values.
_TOKEN_EXTRA_BYTES: Final = 64
# The fingerprint of a prompt of half a million bytes has some 90,000 characters.
_FINGERPRINT_MAX_CHARACTERS: Final = 128 * 1024


async def save(
    task: SlotTask, client: EngineClient, saved_tasks: dict[int, int | None], saved: list[Manifest]
) -> None:
    """Save the idle slots, the most recently used first; update `saved_tasks` and `saved`.

    Returns when all of them are stored, and also those that were written before. Raises
    EngineUnreachable, and OSError or AccessDenied if the disk refused.
    """
    await task.files.wait_loaded()
    found = await client_module.get_slots(client)
    if isinstance(found, ErrorResponse):
        return
    fingerprints, now = task.fingerprints(found), datetime.now(tz=UTC)
    for rank, slot in enumerate(_worth_saving(task, found, saved_tasks)):
        fingerprint = fingerprints.get(slot.id_slot, ConversationFingerprint())
        if not task.files.catalogue.holds(task.key_digest, slot.tokens, fingerprint):
            used_at = now - timedelta(milliseconds=rank)
            spooled = await write(task, client, slot.id_slot, fingerprint, used_at)
            storing = task.files.store(spooled, task.pause_saving) if spooled else None
            if storing and (manifest := await asyncio.shield(storing)):
                saved.append(manifest)
        saved_tasks[slot.id_slot] = slot.task
    await task.files.settle(task.instance)


def _worth_saving(
    task: SlotTask, found: tuple[SlotState, ...], saved_tasks: Mapping[int, int | None]
) -> list[SlotState]:
    task.spool()  # makes the directory whose free space counts
    gguf = task.plan.gguf
    values = sum(gguf.kv_heads) * (gguf.key_length + gguf.value_length)
    return policy.worth_saving(
        found,
        saved_tasks,
        task.files.budget,
        token_bytes=2 * values + _TOKEN_EXTRA_BYTES,  # a cache is rarely wider than f16
        room_bytes=min(task.files.rooms_bytes.values()),
        key=task.key,
    )


async def write(
    task: SlotTask,
    client: EngineClient,
    id_slot: int,
    fingerprint: ConversationFingerprint,
    used_at: datetime,
) -> SpooledFile | None:
    """Have the engine write a slot; None if it refused, or if its adapters are unknown.

    Raises EngineUnreachable, and OSError or AccessDenied without a spool directory.
    """
    text = fingerprint.to_ascii()
    text = text if len(text) <= _FINGERPRINT_MAX_CHARACTERS else ""
    if task.plan.has_chosen_adapters and not (text and fingerprint.scales):
        return None
    spooled = task.spool() / f"{secrets.token_hex(8)}.new"
    try:
        written = await client_module.save(client, id_slot, spooled.name)
    except BaseException:
        spooled.unlink(missing_ok=True)
        raise
    if isinstance(written, ErrorResponse):
        spooled.unlink(missing_ok=True)
        detail = written.message or str(written.status)
        task.pause_saving(f"slot {id_slot}: {detail}")
        if written.status == HTTPStatus.NOT_IMPLEMENTED:  # older builds, for a model with pictures
            problem = f"its engine does not save them: {detail}"
            task.store.outcomes.set(task.key, RestoreOutcome(task.model, problem=problem))
        return None
    manifest = Manifest(
        name=spooled.stem,
        model=task.model,
        replica=task.replica[0],
        identity=task.key,
        size_bytes=written.size_bytes,
        checksum="",
        tokens=written.tokens,
        tokens_sha256="",
        ctx_slot=task.ctx_slot,
        fingerprint=text,
        saved_at=datetime.now(tz=UTC),
        used_at=used_at,
        daemon=task.store.shared.daemon if task.store.shared else "",
    )
    return SpooledFile(spooled, manifest, written.duration_s, task.store, task.budget)


UNUSED: Final = "its engine used nothing of a restored conversation"
_FAILED: Final = "its engine failed over a restored conversation"
_ENDED: Final = "its engine ended when it used a restored conversation"
# An engine that does not use the slot computes all tokens, so the shortest file is tried.
_TIMEOUT_S: Final = 30.0


async def uses_restored(
    task: SlotTask, client: EngineClient, files: Sequence[CataloguedFile], id_slot: int
) -> bool:
    """Return whether restored slots work, if known; empties the slot. Raises EngineUnreachable."""
    if known := task.store.outcomes.get(task.key):
        return not known.problem
    outcome = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                outcome = await _try_restore(task, client, files, id_slot)
    except EngineUnreachable:
        outcome = RestoreOutcome(task.model, problem=_ENDED)
        raise
    finally:
        if outcome:
            note_outcome(task, outcome)
    return outcome is None or not outcome.problem


def note_outcome(task: SlotTask, outcome: RestoreOutcome) -> None:
    task.store.outcomes.set(task.key, outcome)
    if outcome.problem:
        expected, found = outcome.expected_tokens, outcome.found_tokens
        task.emit("slots.restore_unused", expected=expected, cached=found)


async def _try_restore(
    task: SlotTask, client: EngineClient, files: Sequence[CataloguedFile], id_slot: int
) -> RestoreOutcome | None:
    """Try the shortest conversation without pictures; None if there is none."""
    for entry in sorted(files, key=attrgetter("file.tokens")):
        tokens = await task.files.run(_text, task, entry.manifest)
        if tokens and await restore_file(task, client, entry, id_slot):
            found = await client_module.cached_tokens(client, id_slot, (*tokens, tokens[-1]))
            await client_module.erase(client, id_slot)
            model = task.model
            if not isinstance(found, ErrorResponse):
                return RestoreOutcome(model, len(tokens), found, "" if found else UNUSED)
            if found.status < HTTPStatus.INTERNAL_SERVER_ERROR:
                return None  # the request was wrong or too long, or the build reports no figures
            return RestoreOutcome(model, len(tokens), 0, f"{_FAILED}: {found.message}")
    return None


def _text(task: SlotTask, manifest: Manifest) -> tuple[int, ...]:
    """Return the tokens of a file; none if it is invalid or holds pictures."""
    try:
        header = task.store.header(manifest)
    except InvalidSlotFile:  # reported when it is restored
        return ()
    return () if header.media else header.tokens


async def restore(
    task: SlotTask, client: EngineClient, restored: list[Manifest]
) -> list[RestoredSlot]:
    """Fill slots, the most recently used conversation first; return all slots.

    Adds the files to `restored`. Raises EngineUnreachable, and OSError or AccessDenied of the disk.
    """
    await task.files.wait_loaded()
    await _empty_spool(task, task.spool())
    found = await client_module.get_slots(client)
    if isinstance(found, ErrorResponse) or not found:
        return []
    filled = await _fill(task, client, found)
    restored += [entry.manifest for entry in filled.values()]
    if filled and needs_refresh(task.plan):
        empty = [id_slot for id_slot in policy.fill_order(found) if id_slot not in filled]
        for id_slot in empty[:1]:
            await client_module.refresh_slot(client, id_slot)
        for id_slot in reversed(filled):
            scales = filled[id_slot].file.fingerprint.scales
            await client_module.refresh_slot(client, id_slot, scales)
    after = await client_module.get_slots(client)
    if isinstance(after, ErrorResponse):
        return []
    return [restored_slot(slot, filled) for slot in after]


async def _fill(
    task: SlotTask, client: EngineClient, found: Sequence[SlotState]
) -> dict[int, CataloguedFile]:
    """Restore the latest conversations, if the engine uses restored slots; return them by slot."""
    empty, filled = policy.fill_order(found), dict[int, CataloguedFile]()
    if not await uses_restored(task, client, _to_restore(task, found), empty[0]):
        return {}
    for entry in _to_restore(task, found):  # some may be invalid
        if not task.files.pays_to_read(entry.file):  # by the speed of the last read
            continue
        try:
            is_filled = await restore_file(task, client, entry, empty[0])
        except ReadGivenUp as error:
            task.emit_restore_failed(error)
            break
        except OSError as error:  # a full spool, which may have room for the next file
            task.emit_restore_failed(error)
            continue
        if is_filled:
            filled[empty.pop(0)] = entry
    return filled


def needs_refresh(plan: Plan) -> bool:
    """Return whether restored slots need an empty request each."""
    # An engine that does not match prompts looks for a conversation in cache-ram if the request
    # names no slot, as requests to some endpoints cannot. It copies idle slots there when another
    # slot is used, so at least two slots must be used. The slot used last is reused last.
    return plan.slots > 1 and not policy.uses_prompt_similarity(plan)


def restored_slot(slot: SlotState, filled: Mapping[int, CataloguedFile]) -> RestoredSlot:
    entry = filled.get(slot.id_slot)
    if entry is None or slot.tokens not in {entry.file.tokens, 0}:  # 0: not reported
        return RestoredSlot(slot.id_slot, slot.task)
    return RestoredSlot(slot.id_slot, slot.task, entry.file.tokens, entry.file.fingerprint)


async def _empty_spool(task: SlotTask, spool: Path) -> None:
    """Quarantine the files whose links are left, because an engine ended while it read them."""
    paths = await asyncio.to_thread(lambda: list(spool.iterdir()))
    left = [path for path in paths if path not in task.files.pending]
    for name in {path.name.partition(".")[0] for path in left if path.suffix == ".slot"}:
        if entry := task.files.catalogue.get(name):
            await _quarantine(task, entry.manifest, "the engine that read it did not answer")
    for path in left:
        path.unlink(missing_ok=True)


def _to_restore(task: SlotTask, found: Sequence[SlotState]) -> list[CataloguedFile]:
    files, store = task.files.catalogue.files(), task.store
    return policy.to_restore(
        [
            entry
            for entry in files
            if (is_prefix(entry.file) or store.is_ours(entry.manifest))
            and task.files.pays_to_read(entry.file)
        ],
        task.key_digest,
        replica=task.replica,
        most=len(found),
        ctx=min(slot.n_ctx for slot in found),
        is_elsewhere=task.is_elsewhere,
    )


async def restore_file(
    task: SlotTask, client: EngineClient, entry: CataloguedFile, id_slot: int
) -> SlotFileInfo | None:
    """Verify a file and fill a slot from it; None if that failed.

    The duration includes both. A file that cannot be used, or during whose read the engine ended,
    is quarantined, with an event. Raises as `restore`.
    """
    if task.plan.has_chosen_adapters:
        # An engine takes what it restores for content of the adapters that the slot has, and drops
        # it for a request with others.
        scales = entry.file.fingerprint.scales
        if not scales:
            return None
        await client_module.refresh_slot(client, id_slot, scales)
    return await _read_file(task, client, entry.manifest, id_slot)


async def _read_file(
    task: SlotTask, client: EngineClient, manifest: Manifest, id_slot: int
) -> SlotFileInfo | None:
    link: Path | None = None
    spool, began_at_s = task.spool(), time.monotonic()
    try:
        link = await _check_out_in_time(task, manifest, spool)
        expected = SlotFileInfo(manifest.tokens, link.stat().st_size)
        verified_s = time.monotonic() - began_at_s
        if has_draft_cache(task.plan.memory_inputs.chosen):
            # Otherwise the slot's draft cache holds another prompt, and the engine responds with
            # 500 ("failed to process speculative batch"; build 10434).
            await client_module.erase(client, id_slot)
        read = await client_module.restore(client, id_slot, link.name)
    except (SlotFileMissing, SlotKeyMissing):  # another program deleted it; the settings changed
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


async def _check_out_in_time(task: SlotTask, manifest: Manifest, spool: Path) -> Path:
    files, began_at_s = task.files, time.monotonic()
    try:
        async with asyncio.timeout(files.read_limit_s(manifest.size_bytes)):
            link = await check_out(task.store, manifest, spool, task.key, files.threads)
    except TimeoutError as error:
        read_s = time.monotonic() - began_at_s
        files.note_read(manifest.size_bytes, read_s)
        reason = f"reading a file in {task.store.root} was given up after {read_s:.1f} s"
        raise ReadGivenUp(reason) from error
    files.note_read(manifest.size_bytes, time.monotonic() - began_at_s)
    return link


async def check_out(
    store: SlotStore, manifest: Manifest, spool: Path, key: CacheKey, threads: Executor
) -> Path:
    """Verify a file in a thread, as `SlotStore.check_out`.

    A thread cannot be cancelled: the file that it makes after that is deleted, not left for
    `_empty_spool`, which would take it for one that ended an engine.
    """
    loop = asyncio.get_running_loop()
    checking = loop.run_in_executor(threads, store.check_out, manifest, spool, key)
    try:
        return await asyncio.shield(checking)
    except asyncio.CancelledError:
        checking.add_done_callback(_discard)
        raise


def _discard(checking: asyncio.Future[Path]) -> None:
    if not checking.cancelled() and checking.exception() is None:
        checking.result().unlink(missing_ok=True)


async def _quarantine(task: SlotTask, manifest: Manifest, reason: str) -> None:
    task.files.catalogue.remove([manifest.name])
    task.emit_quarantined(await task.files.run(task.store.quarantine_file, manifest, reason))
