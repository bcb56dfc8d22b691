"""The slot files of a daemon: which there are, and those that engines have just written.

What an engine has written is verified, hashed and stored one file after another, in a thread. What
waits for that is bounded: beyond it no engine is asked to save.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.prompt_cache.slot_file import SlotFile
from supervisor.errors import AccessDenied
from supervisor.slot_store.catalogue import Catalogue, SlotFileListener, key_digest
from supervisor.slot_store.config import SlotPersistence
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.policy import DiskBudget, to_evict
from supervisor.slot_store.replacement import missing, replaced_by
from supervisor.slot_store.slot_file import InvalidSlotFile
from supervisor.slot_store.store import SlotStore

# The last token of an answer is not in the cache, nor is the one that ends it.
TOKENS_AWAY_MAX: Final = 2
# Written by engines and not stored yet, at most; a single file may be larger.
_PENDING_MAX: Final = 32
_PENDING_MAX_BYTES: Final = 2 * 1024**3
# Of files that nothing is known of, so many are compared token by token.
_COMPARED_MAX: Final = 16
# Of prefixes for engines with the same cache key; the least recently used go first.
_PREFIXES_MAX: Final = 16
# So many manifests are taken in at once, within milliseconds.
_LOADED_AT_ONCE: Final = 32


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SpooledFile:
    """A file that an engine has written, for `duration_s`."""

    path: Path
    unverified: Manifest
    duration_s: float
    store: SlotStore
    budget: DiskBudget


class SlotFiles:
    """The slot files of a daemon."""

    def __init__(
        self, persistence: Callable[[], SlotPersistence], listener: SlotFileListener
    ) -> None:
        self.catalogue = Catalogue(listener)
        self._persistence = persistence
        self._lock = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None
        self._loaded = asyncio.Event()
        self._pending: dict[asyncio.Task[Any], SpooledFile] = {}

    @property
    def timeout_s(self) -> float:
        """The time for an engine to write or read one slot."""
        return self._persistence().timeout_s

    async def serve(self) -> None:
        """Read what is on the disk, and run what is started, until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._group:
                if not self._loaded.is_set():
                    await self._load()
                    self._loaded.set()
                await asyncio.get_running_loop().create_future()
        finally:
            self._group = None

    async def loaded(self) -> None:
        """Wait until the catalogue is complete."""
        await self._loaded.wait()

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result] | None:
        """Run work that outlives its caller; None while nothing is served."""
        if self._group is None:
            work.close()
            return None
        return self._group.create_task(work, name=name)

    async def _load(self) -> None:
        store = self._persistence().store
        found = await asyncio.to_thread(store.saved)
        for begin in range(0, len(found), _LOADED_AT_ONCE):
            for manifest in found[begin : begin + _LOADED_AT_ONCE]:
                self.catalogue.add(manifest, is_readable=store.content.is_readable(manifest))
            await asyncio.sleep(0)

    def check_keys(self) -> None:
        """Find out which files can be read with the keys of new settings."""
        self.catalogue.check_readable(self._persistence().store.content.is_readable)

    def may_save(self, size_bytes: float) -> bool:
        """Return whether an engine may write a file of this size now."""
        persistence = self._persistence()
        pending_bytes = sum(one.unverified.size_bytes for one in self._pending.values())
        if not persistence.is_on or persistence.problem or len(self._pending) >= _PENDING_MAX:
            return False
        if pending_bytes and pending_bytes + size_bytes > _PENDING_MAX_BYTES:
            return False
        try:
            room_bytes = persistence.store.room_bytes()
        except OSError:  # not made yet, or gone: the next save makes it
            return True
        budget = persistence.budget
        return size_bytes <= min(room_bytes, budget.model_share * budget.size_bytes)

    def has(self, cache_key: str, tokens: int, fingerprint: ConversationFingerprint) -> bool:
        """Return whether a file holds as much of a conversation, or all of a prompt of none."""
        if fingerprint.turn_hashes:
            return any(
                one.file.fingerprint == fingerprint and one.file.tokens >= tokens - TOKENS_AWAY_MAX
                for one in self.catalogue.of_conversation(cache_key, fingerprint)
            )
        return bool(fingerprint.blocks) and any(
            one.file.cache_key == cache_key
            and not one.file.is_recurrent
            and not missing(fingerprint, one.file.fingerprint)
            for one in self.catalogue.files()
        )

    def is_pending(self, path: Path) -> bool:
        return any(one.path == path for one in self._pending.values())

    def store(
        self, spooled: SpooledFile, failed: Callable[[str], None]
    ) -> asyncio.Task[Manifest | None] | None:
        """Store a file in the background; its result is None if it is redundant or that failed."""
        task = self.start(self._store(spooled, failed), f"store {spooled.unverified.name}")
        if task:
            self._pending[task] = spooled
            task.add_done_callback(self._pending.pop)
        return task

    async def settle(self, instance: str | None = None) -> None:
        """Wait until the files of an instance, or of all, are stored."""
        waiting = [
            task for task, one in self._pending.items() if instance in {None, one.path.parent.name}
        ]
        if waiting:
            await asyncio.wait(waiting)

    async def _store(self, spooled: SpooledFile, failed: Callable[[str], None]) -> Manifest | None:
        try:
            async with self._lock:
                return await self._keep(spooled)
        except (OSError, AccessDenied, InvalidSlotFile) as error:
            failed(str(error))
            return None

    async def _keep(self, spooled: SpooledFile) -> Manifest | None:
        store, budget = spooled.store, spooled.budget
        others = [] if spooled.unverified.fingerprint else self._unknown(spooled.unverified)
        manifest, replaced = await asyncio.to_thread(
            store.add, spooled.path, spooled.unverified, others, budget.tokens_min
        )
        if manifest is None:
            return None
        new = self.catalogue.add(manifest)
        gone = self.catalogue.remove(
            [*self._replaced_by(new.file, budget), *(one.name for one in replaced)]
        )
        kept = [one.manifest for one in self.catalogue.files()]
        gone += self.catalogue.remove(one.name for one in to_evict(kept, budget))
        if gone:
            await asyncio.to_thread(store.drop, gone)
        return manifest

    def _unknown(self, new: Manifest) -> list[Manifest]:
        """Return files of which only the tokens tell what they hold."""
        found = self.catalogue.anonymous(key_digest(new.model, new.identity))
        unknown = (one.manifest for one in found if not one.file.fingerprint.blocks)
        return list(islice(unknown, _COMPARED_MAX))

    def _replaced_by(self, new: SlotFile, budget: DiskBudget) -> list[str]:
        if new.fingerprint.turn_hashes:
            others = self.catalogue.of_conversation(new.cache_key, new.fingerprint)
            return replaced_by(new, (one.file for one in others), budget.tokens_min, is_own=True)
        if new.fingerprint.blocks:
            others = self.catalogue.anonymous(new.cache_key)
            known = [one.file for one in others if one.file.fingerprint.blocks]
            surplus = [one.name for one in known[_PREFIXES_MAX:]]
            return [*surplus, *replaced_by(new, known, budget.tokens_min, is_own=False)]
        return []
