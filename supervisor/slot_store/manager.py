"""Saves the idle slots of one replica, and restores them into its next run.

An engine writes and reads in its spool directory, never in the slot store. While it does,
it decodes nothing, so it gets no other work; its file is stored afterwards. Each file is verified
before it is kept and again before an engine reads it. No error here fails an instance or a request:
it is logged once, and the request is served without a cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from attrs import define, field

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.cache.save_policy import Transfer
from proxy.cache.shared_prefixes import shared_prefix
from proxy.upstream.upstream import Timings
from supervisor.engine.client import EngineClient, EngineUnreachable
from supervisor.engine.prompts import WarmPrompt
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.plan.plan import Plan
from supervisor.slot_store.file_index import TOKENS_AWAY_MAX, find_prefix
from supervisor.slot_store.manifest import CacheKey, Manifest, cache_key
from supervisor.slot_store.slot_files import Fingerprints, SlotFiles, SlotTask
from supervisor.slot_store.slot_transfer import (
    UNUSED,
    note_outcome,
    restore,
    restore_file,
    save,
    write,
)
from supervisor.slot_store.store import RestoreOutcome
from supervisor.slot_store.store_config import SlotPersistence

# This many responses in a row without a token from the cache prove that restored slots are unused.
_UNUSED_MAX: Final = 2


@define(eq=False, slots=False, kw_only=True)
class SlotManager:
    """Saves and restores the slots of one replica.

    `replica` returns its number, from 0, and the number of the model's replicas.
    `save_predecessors` saves the slots of serving instances that it will replace.
    """

    _instance: str
    _model: str
    _replica: Callable[[], tuple[int, int]]
    _plan: Callable[[], Plan | None]
    _persistence: Callable[[], SlotPersistence]
    _files: SlotFiles
    _fingerprints: Fingerprints
    _is_elsewhere: Callable[[ConversationFingerprint], bool]
    _save_predecessors: Callable[[], Awaitable[None]]
    _emit: Emit
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _run: int = field(default=0, init=False)
    _keyed: tuple[Plan, CacheKey] | None = field(default=None, init=False)
    _saved_tasks: dict[int, int | None] = field(factory=dict, init=False)
    _restored: tuple[RestoredSlot, ...] = field(default=(), init=False)
    # The disk refused the last save; idle engines save every minute, and one warning is enough.
    _has_disk_failed: bool = field(default=False, init=False)
    _unused: int = field(default=0, init=False)  # responses in a row that used no restored token

    @property
    def reason(self) -> str | None:
        """Why no slot is saved, as a clause; None if they are, or before the first run."""
        plan = self._plan()
        return self._persistence().reason(plan) if plan else None

    def restored_slots(self, run: int) -> tuple[RestoredSlot, ...]:
        """Return all slots at the start of a run; none if nothing was restored."""
        return self._restored if run == self._run else ()

    def check_restore(self, tokens: int, timings: Timings) -> bool:
        """Check the first response to a prompt whose slot was filled with `tokens` of it.

        Returns whether the engine uses restored slots, as far as known. Responses count only before
        the first proof. One token from the cache is a proof: a template that writes the date
        changes the rest of the prompt on another day. No token is a disproof only twice in a row,
        because something else may have used the slot meanwhile. A recurrent model or a sliding
        window may use nothing of an edited prompt.
        """
        task = self._task(self._run)
        if task is None or task.store.outcomes.get(task.key):
            return True
        expected = min(tokens, timings.cached_tokens + timings.prompt_tokens)
        found = min(expected, timings.cached_tokens)
        if expected < task.budget.tokens_min or (not found and task.key.is_all_or_nothing):
            return True
        self._unused = 0 if found else self._unused + 1
        if not found and self._unused < _UNUSED_MAX:
            return True
        problem = "" if found else UNUSED
        note_outcome(task, RestoreOutcome(task.model, expected, found, problem))
        return not problem

    async def save(self, client: EngineClient, run: int) -> Sequence[str]:
        """Save the idle slots that are not saved yet, within the limits; return what failed."""
        task = self._task(run)
        if task is None:
            return ()
        if run != self._run:
            self._saved_tasks, self._restored, self._run = {}, (), run
        saved, began_at_s = list[Manifest](), time.monotonic()
        reason, is_of_disk = "", False
        try:
            async with asyncio.timeout(self._persistence().timeout_s), self._lock:
                await save(task, client, self._saved_tasks, saved)
        except TimeoutError:
            reason = "it took longer than slot_save_timeout_s; the rest is not saved"
        except EngineUnreachable as error:
            reason = f"the engine does not answer: {error}"
        except (OSError, AccessDenied) as error:
            reason, is_of_disk = str(error), True
        if is_of_disk and self._has_disk_failed:
            task.failures.append(reason)
        elif reason:
            task.emit_failed(reason)
        self._has_disk_failed = is_of_disk
        task.emit_transfer("slots.saved", saved, began_at_s)
        return task.failures

    async def save_slot(
        self,
        client: EngineClient,
        run: int,
        id_slot: int,
        tokens: int,
        fingerprint: ConversationFingerprint,
    ) -> Transfer | None:
        """Have the engine write an idle slot of `tokens`, or up to 2 fewer; None if that failed.

        The file is stored in the background. Raises nothing.
        """
        task = self._task(run)
        if task is None:
            return None
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
            spooled.path.unlink(missing_ok=True)  # another conversation took the slot
            return None
        task.files.store(spooled, task.pause_saving)
        return Transfer(written.tokens, written.size_bytes, spooled.duration_s)

    async def restore_slot(
        self, client: EngineClient, run: int, id_slot: int, name: str
    ) -> Transfer | None:
        """Fill an idle slot; None if that failed. Raises nothing; forgets an unusable file."""
        if (task := self._task(run)) is None:
            return None
        found = task.files.catalogue.get(name)
        is_paused = task.files.restore_pause.is_on
        if found is None or is_paused or not _fits(task, found.manifest):
            return None
        try:
            read = await restore_file(task, client, found, id_slot)
        except EngineUnreachable as error:
            if task.files.catalogue.get(name):  # otherwise its quarantine was reported
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
        task.files.start(task.files.run(task.store.mark_used, found.manifest, now), f"use {name}")
        return Transfer(read.tokens, read.size_bytes, read.duration_s)

    async def restore(self, client: EngineClient, run: int) -> int:
        """Fill slots with latest conversations and shared prefixes; count the former."""
        task = self._task(run)
        if task is None:
            return 0
        await self._save_predecessors()
        restored, began_at_s = list[Manifest](), time.monotonic()
        try:
            found = await restore(task, client, restored)
        except EngineUnreachable:
            pass  # the health checks notice it
        except (OSError, AccessDenied) as error:
            task.emit_restore_failed(error)
        else:
            self._saved_tasks = {slot.id_slot: slot.task for slot in found}
            self._restored, self._run = tuple(found) if restored else (), run
        task.emit_transfer("slots.restored", restored, began_at_s)
        return sum(
            slot.tokens > 0 and not (slot.fingerprint.blocks and not slot.fingerprint.turn_hashes)
            for slot in self.restored_slots(run)
        )

    def has_prompt(self, prompt: WarmPrompt) -> bool:
        """Return whether requests that begin with this prompt can continue from a slot file."""
        task = self._task(self._run)
        if task is None or not task.plan.has_own_slots:
            return False
        prefix = shared_prefix(task.model, prompt.body)
        found = prefix and find_prefix(
            task.files.catalogue, task.key_digest, prefix.blocks, task.budget.tokens_min
        )
        return bool(found and task.store.content.is_readable(found.manifest))

    def _task(self, run: int) -> SlotTask | None:
        persistence, plan = self._persistence(), self._plan()
        if plan is None or self.reason:
            return None
        return SlotTask(
            run,
            self._instance,
            self._model,
            self._replica(),
            plan,
            self._fingerprints,
            self._is_elsewhere,
            self._key(plan),
            self._files,
            persistence.store,
            persistence.limits,
            self._emit,
        )

    def _key(self, plan: Plan) -> CacheKey:
        """Return the cache key of a plan; reads the files in its options once per plan."""
        if self._keyed is None or self._keyed[0] is not plan:
            self._keyed = plan, cache_key(plan)
        return self._keyed[1]


def _fits(task: SlotTask, manifest: Manifest) -> bool:
    has_room = not task.ctx_slot or manifest.tokens < task.ctx_slot
    return has_room and manifest.model == task.model and task.key.fits(manifest.identity)
