"""The slot files of a daemon, those just written, and the values that saving and restoring share.

After an engine has written a file, it is verified, hashed and stored in a thread, one file after
another. The queue of these is bounded: while it is full, no engine is asked to save.

A shared directory is looked at every second for files of other daemons, in threads of its own: a
network file system may not answer for minutes. Then nothing is saved, and a restore that takes four
times as long as the measured speed suggests is given up. The speeds at which prompts were computed
are kept for the next start, when conversations are restored before the first prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from prometheus_client import Metric

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.common.background_tasks import worker_threads
from proxy.observe.metrics import gauge
from proxy.upstream.engine_state import SlotState
from supervisor.errors import AccessDenied
from supervisor.events import Emit, Part
from supervisor.output import size
from supervisor.plan.plan import Plan
from supervisor.slot_store.file_index import Catalogue, key_digest
from supervisor.slot_store.manifest import CacheKey, Manifest, Turns, find_conversation, turns_of
from supervisor.slot_store.policy import DiskBudget
from supervisor.slot_store.save_limits import Pause, PendingFiles, SaveLimits, SpooledFile, to_evict
from supervisor.slot_store.slot_file import InvalidSlotFile
from supervisor.slot_store.store import DISK, RESERVE_BYTES, QuarantinedFile, SlotStore
from supervisor.slot_store.store_config import SlotPersistence

if TYPE_CHECKING:
    from proxy.router.router import Router

# Adding this many manifests takes milliseconds; then other tasks get their turn.
_READ_AT_ONCE: Final = 32
# How often to look for files that are too old or gone.
_TIDY_S: Final = 600.0
# How often to look for files of other daemons in a shared directory, and after which time without
# an answer it counts as failed.
_POLL_S: Final = 1.0
_SILENT_S: Final = 15.0
_THREADS: Final = 4
# Before the first measurement. The fixed part of a read is not its speed.
_BYTE_S: Final = 1e-9
_FIXED_S: Final = 0.01
_READ_LIMIT: Final = 4.0
_READ_LIMIT_MIN_S: Final = 2.0

Result = TypeVar("Result")


class SlotFiles(Part):
    def __init__(
        self, persistence: Callable[[], SlotPersistence], listener: Router, emit: Emit
    ) -> None:
        self.catalogue = Catalogue(listener)
        self._listener = listener
        self._emit = emit
        self.limits = SaveLimits()
        self._persistence = persistence
        self._lock = asyncio.Lock()
        self._group: asyncio.TaskGroup | None = None
        self._read_from: SlotPersistence | None = None
        self.pending = PendingFiles()
        self.restore_pause = Pause()
        self._room_pause = Pause()
        self.threads = worker_threads(_THREADS, "slots")
        self._wake = asyncio.Event()
        self._answered_at_s = float("-inf")  # a shared directory, with these rooms
        self._shared_rooms_bytes: Mapping[str, int] = {}
        self._fault = ""  # why it could not be used at the last look
        self._has_unreadable = False  # some files could not be read at the last look
        self._looking: asyncio.Task[None] | None = None
        self._byte_s = _BYTE_S
        self._measured_at_s = float("-inf")

    @property
    def budget(self) -> DiskBudget:
        """The limits of now; raises OSError: the disk does not answer."""
        persistence, free_bytes = self._persistence(), None
        if persistence.store.shared and persistence.limits.is_auto:
            free_bytes = self.rooms_bytes[DISK] + RESERVE_BYTES
        return persistence.budget(self.catalogue.size_bytes, free_bytes)

    @property
    def rooms_bytes(self) -> Mapping[str, int]:
        """As `SlotStore.rooms_bytes`; of a shared directory, as it answered last."""
        store = self._persistence().store
        if not store.shared:
            return store.rooms_bytes()
        if self._is_silent:
            reason = self._fault or f"{store.root} has not answered for {_SILENT_S:.0f} s"
            raise OSError(reason)
        return self._shared_rooms_bytes

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._answered_at_s > _SILENT_S

    async def run(self, work: Callable[..., Result], *given: object) -> Result:
        """Run a function that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *given)

    def read_limit_s(self, size_bytes: int) -> float | None:
        """Return how long a file may take to be read; None: as long as it takes."""
        if not self._persistence().store.shared:
            return None
        expected_s = _READ_LIMIT * size_bytes * self._byte_s
        return min(self.timeout_s, max(_READ_LIMIT_MIN_S, expected_s))

    def note_read(self, size_bytes: int, duration_s: float) -> None:
        """Note how long a file of a shared directory was read, at least."""
        if self._persistence().store.shared:
            self._byte_s = max(_BYTE_S, (duration_s - _FIXED_S) / size_bytes)
            self._measured_at_s = time.monotonic()
            self._listener.note_read_time(self._byte_s)

    def pays_to_read(self, file: SlotFile) -> bool:
        """Return whether to begin with a file; of a shared directory, if it is read quickly."""
        return not self._persistence().store.shared or self._listener.pays_to_read(file)

    @property
    def timeout_s(self) -> float:
        """The time for an engine to write or read one slot."""
        return self._persistence().timeout_s

    async def serve(self) -> None:
        """Read the files on disk, and run the started work, until cancelled."""
        self._read_from = None
        self._listener.set_prefill_rates(self._persistence().store.read_rates())
        try:
            async with asyncio.TaskGroup() as self._group:
                while True:
                    tidy_at_s = time.monotonic() + _TIDY_S
                    await self._tidy()
                    while (left_s := tidy_at_s - time.monotonic()) > 0:
                        is_shared = self._persistence().store.shared is not None
                        with suppress(TimeoutError):
                            async with asyncio.timeout(
                                min(left_s, _POLL_S) if is_shared else left_s
                            ):
                                await self._wake.wait()
                        self._wake.clear()
                        await self.look()
        finally:
            self._group = None
            self._persistence().store.keep_rates(self._listener.prefill_rates)

    async def _tidy(self) -> None:
        """Delete files that are too old or have no manifest, and measure a shared directory."""
        store = self._persistence().store
        await self.look()
        await self.reconcile()
        try:
            if store.shared:
                await self.run(store.keep_rates, self._listener.prefill_rates)
                await self.run(store.delete_partial)
                await self._measure(store)
            async with self._lock:
                await self.evict()
        except (OSError, AccessDenied) as error:
            self._pause_saving(str(error))

    async def look(self, limit_s: float | None = None) -> None:
        """Take note of files that other daemons added to a shared directory, or deleted.

        Does not wait for a directory that has not answered lately if there is a limit.
        """
        if not self._persistence().store.shared:
            return
        # A look that began earlier may have missed the latest files.
        earlier = self._looking if self._looking and not self._looking.done() else None
        if earlier and limit_s is not None and self._is_silent:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if earlier:
                    await asyncio.wait({earlier})
                if self._looking is earlier or self._looking is None or self._looking.done():
                    self._looking = self.start(self._look(), "look for slot files")
                if self._looking and (limit_s is None or not self._is_silent):
                    await asyncio.wait({self._looking})

    async def _look(self) -> None:
        try:
            has_changed, rooms_bytes = await self.run(self._persistence().store.poll)
            self._shared_rooms_bytes, self._answered_at_s = rooms_bytes, time.monotonic()
            self._fault = ""
            if has_changed:
                async with self._lock:
                    await self._reconcile()
                    await self.evict()
        except (OSError, AccessDenied) as error:
            self._fault = str(error)
            self._pause_saving(self._fault)

    async def _measure(self, store: SlotStore) -> None:
        """Measure how fast a shared directory is read, unless a restore did lately."""
        if time.monotonic() - self._measured_at_s < _TIDY_S or not len(self.catalogue):
            return
        largest = max(self.catalogue.files(), key=lambda entry: entry.manifest.size_bytes)
        if measured := await self.run(store.measure_read, largest.manifest):
            self.note_read(*measured)

    def metrics(self) -> Iterator[Metric]:
        """Yield the number and size of each model's files."""
        counts, sizes_bytes = Counter[str](), Counter[str]()
        for entry in self.catalogue.files():
            counts[entry.manifest.model] += 1
            sizes_bytes[entry.manifest.model] += entry.manifest.size_bytes
        yield gauge("slot_files", {(model,): count for model, count in counts.items()})
        sizes = {(model,): size_bytes for model, size_bytes in sizes_bytes.items()}
        yield gauge("slot_file_disk_bytes", sizes)

    async def wait_loaded(self) -> None:
        """Wait until the catalogue matches the present settings."""
        if self._read_from is not self._persistence():
            await self.reconcile()

    async def reconcile(self) -> None:
        """Forget files that other programs deleted, and add those that they added."""
        try:
            async with self._lock:
                await self._reconcile()
        except (OSError, AccessDenied) as error:
            self._pause_saving(str(error))

    def start(self, work: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result] | None:
        """Run work in a task that outlives the caller; None while this is not served."""
        if self._group is None:
            work.close()
            return None
        return self._group.create_task(work, name=name)

    def check_keys(self) -> None:
        """Read the files again whose keys new settings added or removed."""
        persistence = self._persistence()
        self._wake.set()
        if persistence.problem:
            self._emit("slots.key_unusable", reason=persistence.problem)
        if names := self.catalogue.find_key_changes(persistence.store.content.is_readable):
            self.catalogue.remove(names)
            self.start(self.reconcile(), "slot files of other keys")

    def may_save(self, size_bytes: float) -> bool:
        persistence = self._persistence()
        try:
            budget = self.budget
        except OSError:
            return False
        return (
            persistence.is_on
            and not persistence.problem
            and size_bytes <= budget.model_bytes
            and self.pending.has_room(size_bytes)
            and self.limits.may_write(size_bytes, budget.write_hour_bytes)
            and self._has_room(size_bytes)
        )

    def _has_room(self, size_bytes: float) -> bool:
        try:
            rooms_bytes = self.rooms_bytes
        except OSError as error:  # not made yet, or gone: the next save makes it
            if is_shared := self._persistence().store.shared is not None:
                self._pause_saving(str(error))
            return not is_shared
        full = next((name for name, room in rooms_bytes.items() if size_bytes > room), "")
        if full and self._room_pause.begin():  # it pauses only warnings: a smaller file may fit
            room, needed = size(max(0, rooms_bytes[full])), size(round(size_bytes))
            reason = (
                f"{full} has too little room: {room} beside its reserve, and {needed} are needed"
            )
            self._emit("slots.disk_full", reason=reason)
        return not full

    def _pause_saving(self, reason: str) -> None:
        if pause_s := self.limits.pause.begin():
            self._emit("slots.saving_paused", reason=reason, retry_in_s=pause_s)

    def store(
        self, spooled: SpooledFile, failed: Callable[[str], None]
    ) -> asyncio.Task[Manifest | None] | None:
        """Store a file in the background; the task returns None if it is redundant or failed.

        Returns None while this is not served.
        """
        task = self.start(self._store(spooled, failed), f"store {spooled.unverified.name}")
        if task:
            self.limits.note_written(spooled.unverified.size_bytes, spooled.budget.write_hour_bytes)
            self.pending.add(spooled, task)
        return task

    async def settle(self, instance: str | None = None) -> None:
        await self.pending.settle(instance)

    async def turns(self) -> Turns:
        """Return the turns of each file on disk, by its name."""
        return turns_of(await self.run(self._persistence().store.list_saved))

    async def forget(self, names: Collection[str], turns: Collection[int]) -> list[Manifest]:
        """Delete files by name, and those of a conversation; return the deleted ones."""
        await self.settle()
        async with self._lock:
            store = self._persistence().store
            saved = await self.run(store.list_saved)
            found = {*names, *find_conversation(turns_of(saved), turns)[0]}
            gone = [manifest for manifest in saved if manifest.name in found]
            self.catalogue.remove(manifest.name for manifest in gone)
            await self.run(store.forget_files, gone)
            return gone

    async def forget_model(self, model: str | None) -> list[Manifest]:
        """Delete the files of a model, or of all, and the quarantine."""
        await self.settle()
        async with self._lock:
            all_files = self.catalogue.files()
            gone = [
                entry.manifest.name for entry in all_files if model in {None, entry.manifest.model}
            ]
            self.catalogue.remove(gone)
            return await self.run(self._persistence().store.forget, model)

    async def _store(self, spooled: SpooledFile, failed: Callable[[str], None]) -> Manifest | None:
        try:
            async with self._lock:
                manifest, slowness = await self._keep(spooled)
        except (OSError, AccessDenied, InvalidSlotFile) as error:
            manifest, slowness = None, str(error)
        if slowness:
            failed(slowness)
        return manifest

    async def _keep(self, spooled: SpooledFile) -> tuple[Manifest | None, str]:
        """Store a file, delete those it replaces; return its manifest, why the disk is slow."""
        new, budget = spooled.unverified, spooled.budget
        others = [] if new.fingerprint else self.catalogue.unidentified(new)
        (manifest, replaced), duration_s = await self.run(
            _run_timed, spooled.store.add, spooled.path, new, others, budget.tokens_min
        )
        if manifest is not None:
            await self._add(manifest, (file.name for file in replaced))
        return manifest, self.limits.note_stored(new.size_bytes, duration_s)

    async def adopt(self, copy: Path, manifest: Manifest) -> SlotFile:
        """Store a copy of another machine's file. Raises OSError, AccessDenied."""
        async with self._lock:
            await self.run(self._persistence().store.adopt, copy, manifest)
            return await self._add(manifest)

    async def _add(self, manifest: Manifest, replaced: Iterable[str] = ()) -> SlotFile:
        known = self.catalogue.add(manifest).file
        tokens_min = self._persistence().limits.tokens_min
        await self._delete([*self.catalogue.find_replaced(known, tokens_min), *replaced])
        await self.evict()
        return known

    async def delete(self, names: Iterable[str]) -> None:
        """Delete files, after the router has forgotten them."""
        async with self._lock:
            await self._delete(names)

    async def _delete(self, names: Iterable[str]) -> None:
        if gone := self.catalogue.remove(names):
            await self.run(self._persistence().store.drop, gone)

    async def _reconcile(self) -> None:
        persistence, known = self._persistence(), self.catalogue.names
        if self._read_from is None:
            self.catalogue.remove(known)
        there, new, invalid = set[str](), list[Manifest](), list[QuarantinedFile]()
        errors = list[OSError]()
        if persistence.is_on:
            there, new, invalid, errors = await self.run(
                persistence.store.read_new, self.catalogue.names
            )
        gone = self.catalogue.remove(known - there)
        is_own = persistence.is_on and persistence.store.shared is None
        if gone and is_own and self._read_from is not None:
            self._emit("slots.files_missing", files=len(gone))
        is_readable = persistence.store.content.is_readable
        for count, manifest in enumerate(new, 1):
            self.catalogue.add(manifest, is_readable=is_readable(manifest))
            if not count % _READ_AT_ONCE:
                await asyncio.sleep(0)
        if unreadable := [manifest for manifest in new if not is_readable(manifest)]:
            keys = sorted({manifest.key_id for manifest in unreadable})
            self._emit("slots.key_missing", files=len(unreadable), keys=keys)
        for model, file, reason in invalid:
            self._emit("slots.quarantined", model=model, file=file, reason=reason)
        self._note_unreadable(persistence.store, errors)
        self._read_from = persistence

    def _note_unreadable(self, store: SlotStore, errors: Sequence[OSError]) -> None:
        if errors and not self._has_unreadable:
            reason = f"{store.root}: {errors[0].strerror}"
            self._emit("slots.files_unreadable", files=len(errors), reason=reason)
        self._has_unreadable = bool(errors)

    async def evict(self) -> None:
        """Delete files beyond the limits, in a shared directory only those of this daemon's charge.

        There the restores of a single daemon do not count, so that all choose the same files.
        """
        store, found = self._persistence().store, self.catalogue.files()
        if store.shared:
            found = [replace(entry, restored_tokens=0.0) for entry in found]
        evicted = [
            entry.manifest
            for entry in to_evict(found, self.budget, datetime.now(tz=UTC))
            if store.shared is None or store.shared.is_in_charge(entry.file.name)
        ]
        used = await self.run(store.find_used, evicted) if store.shared and evicted else {}
        for name, used_at in used.items():
            self.catalogue.note_use(name, used_at)
        await self._delete(manifest.name for manifest in evicted if manifest.name not in used)


def _run_timed(work: Callable[..., Result], *given: object) -> tuple[Result, float]:
    began_at_s = time.monotonic()
    return work(*given), time.monotonic() - began_at_s


# Returns the proxy's fingerprints of the conversations in idle slots.
Fingerprints = Callable[[Sequence[SlotState]], Mapping[int, ConversationFingerprint]]


@dataclass(frozen=True, slots=True)
class SlotTask:
    """The context of one save or restore of a replica's slots."""

    run: int
    instance: str
    model: str
    # The number of the replica, from 0, and the number of the model's replicas.
    replica: tuple[int, int]
    plan: Plan
    fingerprints: Fingerprints
    is_elsewhere: Callable[[ConversationFingerprint], bool]
    key: CacheKey
    files: SlotFiles
    store: SlotStore
    budget: DiskBudget
    emit_any: Emit  # adds nothing to an event; `emit` adds the instance and the model
    failures: list[str] = field(default_factory=list)  # why slots were not saved

    @property
    def key_digest(self) -> str:
        return key_digest(self.model, self.key)

    @property
    def ctx_slot(self) -> int:
        """The context size of a slot; 0 if the engine decides."""
        return self.plan.ctx_size // max(1, self.plan.slots)

    def emit(self, event: str, **fields: object) -> None:
        self.emit_any(event, instance=self.instance, model=self.model, **fields)

    def spool(self) -> Path:
        """Make the directory in which the engine writes and reads; raises AccessDenied."""
        return self.store.spool(self.instance)

    def emit_transfer(self, event: str, moved: Sequence[Manifest], began_at_s: float) -> None:
        if moved:
            self.emit(
                event,
                run=self.run,
                slots=len(moved),
                tokens=sum(manifest.tokens for manifest in moved),
                size_bytes=sum(manifest.size_bytes for manifest in moved),
                duration_ms=round(1000 * (time.monotonic() - began_at_s), 1),
            )

    def emit_failed(self, reason: str) -> None:
        self.failures.append(reason)
        self.emit("slots.save_failed", run=self.run, reason=reason)

    def emit_restore_failed(self, error: Exception) -> None:
        self.emit("slots.restore_failed", run=self.run, reason=str(error))

    def pause_saving(self, reason: str) -> None:
        """Save nothing for some time, except when an instance stops; report it once."""
        if pause_s := self.files.limits.pause.begin():
            reason = f"{reason}; more is saved in {pause_s:.0f} s"
            self.emit_failed(reason)
        else:
            self.failures.append(reason)

    def emit_quarantined(self, found: QuarantinedFile) -> None:
        model, file, reason = found
        self.emit_any("slots.quarantined", model=model, file=file, reason=reason)
