"""Slot files on disk: a private directory, a manifest beside each file, a budget, a quarantine.

    slots/kept/MODEL/NAME.slot, NAME.json    saved slots
    slots/spool/INSTANCE/                    an engine writes and reads here; this is in memory
                                             if files are encrypted
    slots/quarantine/                        invalid files, for some days
    slots/outcomes.json                      whether engines used their first restored slot
    slots/prefill_rates.json                 how fast engines computed prompts, if files are shared

Several daemons may share the saved slots and the quarantine, by `slots_directory`; see
`shared_directory`. Then a file that is gone or cannot be read says nothing about its content.

File names are random; a model's directory has its name, which the settings checked. A file appears
by rename, whole and on the disk, and its manifest after it: a file without a manifest does not
count. Commands may use the directory beside a daemon, whose `Catalogue` holds it in memory. All
methods block; call them in a thread.

An outcome belongs to a cache key without its number of slots: a model, a build, and the options
that matter to a cache. So another build or option is tried again. The file is read at every use, so
commands may delete entries; an unreadable file counts as empty.

Invalid files must not be given to an engine, but are kept for inspection: a file that changed by
itself may mean a failing disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from attrs import define

from supervisor.engine.client import SlotFileInfo
from supervisor.errors import access_denied
from supervisor.slot_store.encryption import PLAIN, SlotContent
from supervisor.slot_store.manifest import (
    OTHER_FORMAT,
    CacheKey,
    Manifest,
    ManifestInvalid,
    dump,
    load,
)
from supervisor.slot_store.policy import is_redundant
from supervisor.slot_store.shared_directory import SharedDirectory
from supervisor.slot_store.slot_file import (
    InvalidSlotFile,
    SlotFileHeader,
    SlotFileMissing,
    extend_window,
    read_checked,
    refit,
)
from supervisor.system import files
from supervisor.system.files import open_regular, write_atomic
from supervisor.system.paths import file_name, is_ours, make_private, name_of_file

_ENTRIES_MAX: Final = 64
_NAME: Final = "outcomes"
_RATES: Final = "prefill_rates"


@dataclass(frozen=True, slots=True)
class RestoreOutcome:
    """Whether an engine used its first restored slot."""

    model: str  # its name in the settings
    expected_tokens: int = 0  # in the slot
    found_tokens: int = 0  # tokens of these that the engine used
    problem: str = ""  # a clause; empty if restored slots are used


class RestoreOutcomes:
    """The latest 64 outcomes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: CacheKey) -> RestoreOutcome | None:
        """Return the outcome of the first restore; None if none was tried."""
        found = self._read().get(_digest(key))
        try:
            return RestoreOutcome(**found) if found else None
        except TypeError:
            return None

    def set(self, key: CacheKey, outcome: RestoreOutcome) -> None:
        """Keep an outcome; a full disk is not an error."""
        entries = self._read()
        entries.pop(digest := _digest(key), None)
        self._write({**entries, digest: asdict(outcome)})

    def forget(self, model: str | None = None) -> None:
        kept = {
            digest: outcome
            for digest, outcome in self._read().items()
            if model not in {None, outcome.get("model")}
        }
        self._write(kept)

    def _read(self) -> dict[str, dict[str, Any]]:
        found = files.get(self._directory, _NAME) or {}
        return found if all(isinstance(outcome, dict) for outcome in found.values()) else {}

    def _write(self, entries: dict[str, dict[str, Any]]) -> None:
        if entries:
            files.put(self._directory, _NAME, dict(list(entries.items())[-_ENTRIES_MAX:]))
        else:
            (self._directory / f"{_NAME}.json").unlink(missing_ok=True)


def _digest(key: CacheKey) -> str:
    text = json.dumps(key.without_slots.members, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


# The model and the name of a file that was moved into quarantine, and why, as a clause.
QuarantinedFile = tuple[str, str, str]


@define(eq=False, slots=False)
class Quarantine:
    """A directory of invalid files, made with mode 0700 when first needed."""

    _root: Path
    _max_files: int = 16
    _max_bytes: int = 1024**3
    _max_age: timedelta = timedelta(days=3)

    def take(self, *paths: Path) -> None:
        make_private(self._root.parent)
        make_private(self._root)
        for path in paths:
            with suppress(FileNotFoundError):
                path.replace(self._root / path.name)
        self.limit()

    def names(self) -> list[str]:
        return sorted(path.name for path in self._files())

    def limit(self) -> None:
        """Delete files that are too old, and the oldest beyond the number of files or bytes."""
        oldest_at = (datetime.now(tz=UTC) - self._max_age).timestamp()
        left_bytes = self._max_bytes
        there = [(path, path.lstat()) for path in self._files() if path.exists()]
        newest_first = sorted(there, key=lambda entry: -entry[1].st_ctime)
        for rank, (path, found) in enumerate(newest_first):
            left_bytes -= found.st_size
            if rank >= self._max_files or left_bytes < 0 or found.st_ctime < oldest_at:
                path.unlink(missing_ok=True)

    def empty(self) -> None:
        """Delete all files. Raises OSError."""
        for path in list(self._files()):
            path.unlink(missing_ok=True)

    def _files(self) -> Iterable[Path]:
        return self._root.iterdir() if self._root.is_dir() else ()


def read_manifest(path: Path) -> Manifest | QuarantinedFile | None:
    """Return a manifest, or why it is invalid; None if it was deleted meanwhile.

    Raises OSError: it cannot be read.
    """
    try:
        found = load(path.read_text("utf-8"))
        used_at = datetime.fromtimestamp(path.stat().st_mtime_ns // 1000 / 1e6, tz=UTC)
    except FileNotFoundError:
        return None
    except (ManifestInvalid, UnicodeDecodeError) as error:
        return name_of_file(path.parent.name), path.stem, str(error)
    if (found.name, file_name(found.model)) != (path.stem, path.parent.name):
        return name_of_file(path.parent.name), path.stem, "its manifest is of another file"
    return replace(found, used_at=max(found.used_at, used_at))


def set_time(path: Path, when: datetime) -> None:
    time_ns = 1000 * round(1e6 * when.timestamp())
    os.utime(path, ns=(time_ns, time_ns))


_DATA: Final = ".slot"
_MANIFEST: Final = ".json"
_DRAFT: Final = ".draft"
# Free space to leave on the disk, independent of the budget.
RESERVE_BYTES: Final = 256 * 1024**2
DISK: Final = "the disk"
_MEMORY_RESERVE_BYTES: Final = 16 * 1024**2
_SPOOL: Final = "spool"
_DISK_ERRORS: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE}
)
_ENDINGS: Final = frozenset({_DATA, _MANIFEST})
_SAMPLE_BYTES: Final = 8 * 1024**2


class SlotStore:
    """The slot files of a data directory, which the first write makes, with mode 0700.

    `content` encrypts the files, by default not; engines use `spool`, by default one in `own`, the
    directory of this daemon. The saved slots are in `own` too, unless they are `shared`.
    """

    def __init__(
        self,
        own: Path,
        content: SlotContent = PLAIN,
        spool: Path | None = None,
        shared: SharedDirectory | None = None,
    ) -> None:
        self._own = own
        self.root = shared.root if shared else own
        self.shared = shared
        self.content = content
        self._spool = spool or own / _SPOOL
        self._is_spool_in_memory = spool is not None
        self._kept = self.root / "kept"
        self.quarantine = Quarantine(self.root / "quarantine")
        self.outcomes = RestoreOutcomes(own)

    def spool(self, instance: str) -> Path:
        """Make the directory in which an engine writes and reads; raises AccessDenied."""
        make_private(self._own)
        make_private(self._spool)
        return make_private(self.spool_path(instance))

    def spool_path(self, instance: str) -> Path:
        return self._spool / file_name(instance)

    def room_bytes(self) -> int:
        """Return the size of the largest file that fits beside a reserve."""
        return min(self.rooms_bytes().values())

    def rooms_bytes(self) -> dict[str, int]:
        """Return the free bytes of the disk, and of the spool if that is elsewhere, by name."""
        rooms = {DISK: shutil.disk_usage(self.root).free - RESERVE_BYTES}
        if self._is_spool_in_memory:
            free_bytes = shutil.disk_usage(self._spool).free
            rooms[f"the memory of {self._spool}"] = free_bytes - _MEMORY_RESERVE_BYTES
        elif self.shared:
            free_bytes = shutil.disk_usage(self._own).free
            rooms[f"the disk of {self._own}"] = free_bytes - RESERVE_BYTES
        return rooms

    def poll(self) -> tuple[bool, dict[str, int]]:
        """Show other daemons that this one is alive; raises as `SharedDirectory.beat`.

        Returns whether they may have added or deleted files, and `rooms_bytes`.
        """
        has_changed = False
        if self.shared:
            self.shared.beat()
            has_changed = self.shared.has_changed([self._kept, *self._directories(None)])
        return has_changed, self.rooms_bytes()

    def _read(self, path: Path) -> Manifest | QuarantinedFile | None:
        """Read a manifest; one of this daemon's own disk that cannot be read is invalid.

        Raises OSError: it is in a shared directory, whose file may be whole.
        """
        try:
            return read_manifest(path)
        except OSError as error:
            if self.shared:
                raise
            return name_of_file(path.parent.name), path.stem, str(error)

    def list_saved(self, model: str | None = None) -> list[Manifest]:
        """Return the valid manifests of a model, or of all. Raises AccessDenied."""
        with access_denied(f"cannot list the files in {self.root}"):
            found = [self._read(path) for path in self._manifests(model)]
        return [
            self.content.unseal(manifest) for manifest in found if isinstance(manifest, Manifest)
        ]

    def mark_used(self, manifest: Manifest, now: datetime) -> None:
        """Set the time of the latest use of a file; a missing file is not an error."""
        with suppress(OSError):
            set_time(self.path(manifest).with_suffix(_MANIFEST), now)

    def is_ours(self, manifest: Manifest) -> bool:
        """Return whether this daemon saved a file, or it is left to it."""
        return self.shared is None or self.shared.owns(manifest.name, manifest.daemon)

    def find_used(self, manifests: Iterable[Manifest]) -> dict[str, datetime]:
        """Return the files that another daemon used since their manifests were read, and when.

        Raises OSError.
        """
        found = {}
        for manifest in manifests:
            now = self._read(self.path(manifest).with_suffix(_MANIFEST))
            if isinstance(now, Manifest) and now.used_at > manifest.used_at:
                found[manifest.name] = now.used_at
        return found

    def measure_read(self, manifest: Manifest) -> tuple[int, float] | None:
        """Read the beginning of a file; return its bytes and the seconds; None if it is gone.

        What memory holds of the file is read from the disk again.
        """
        with suppress(FileNotFoundError), open_regular(self.path(manifest)) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began_at_s = time.monotonic()
            read_bytes = len(file.read(_SAMPLE_BYTES))
            return (read_bytes, time.monotonic() - began_at_s) if read_bytes else None
        return None

    def read_rates(self) -> dict[str, float]:
        """Return the prompt tokens per second of the last run, by cache key."""
        found = files.get(self._own, _RATES) or {}
        return {key: rate for key, rate in found.items() if isinstance(rate, float) and rate > 0}

    def keep_rates(self, rates: Mapping[str, float]) -> None:
        if self.shared and rates:
            files.put(self._own, _RATES, dict(list(rates.items())[-_ENTRIES_MAX:]))

    def read_new(
        self, known: Collection[str]
    ) -> tuple[set[str], list[Manifest], list[QuarantinedFile], list[OSError]]:
        """Return all names, manifests not `known`, and invalid files, which are quarantined.

        The errors are those of manifests in a shared directory that cannot be read now.
        """
        paths = list(self._manifests(None))
        found, errors = list[Manifest | QuarantinedFile | None](), list[OSError]()
        for path in paths:
            if path.stem not in known:
                try:
                    found.append(self._read(path))
                except OSError as error:
                    errors.append(error)
        invalid = [file for file in found if isinstance(file, tuple)]
        if self.shared:  # daemons of a later version may write these
            invalid = [file for file in invalid if file[-1] != OTHER_FORMAT]
        for file in invalid:
            self._quarantine(*file[:2])
        new = [
            self.content.unseal(manifest) for manifest in found if isinstance(manifest, Manifest)
        ]
        return {path.stem for path in paths}, new, invalid, errors

    def add(
        self, spooled: Path, unverified: Manifest, others: Iterable[Manifest], tokens_min: int
    ) -> tuple[Manifest | None, list[Manifest]]:
        """Move a file from the spool; return its complete manifest and the files that it replaces.

        `others` are compared with it token by token. The manifest is None if one of them makes the
        file redundant. Nothing is stored after InvalidSlotFile, if it differs from the engine's
        report, or OSError.
        """
        try:
            header = read_checked(spooled, SlotFileInfo(unverified.tokens, unverified.size_bytes))
            if unverified.identity.window:
                unverified = self._with_whole_window(spooled, unverified)
            headers = {}
            for other in others:
                with suppress(InvalidSlotFile, OSError):  # reported before it is restored
                    headers[other] = self.content.header(self.path(other), other)
            redundant, replaced = is_redundant(header, unverified.used_at, headers, tokens_min)
            if redundant:
                return None, []
            manifest = self.content.complete(unverified, spooled, header)
            self._put(spooled, manifest)
        finally:
            spooled.unlink(missing_ok=True)
        return manifest, replaced

    def _with_whole_window(self, spooled: Path, unverified: Manifest) -> Manifest:
        try:
            extend_window(spooled)
        except InvalidSlotFile as error:
            problem = f"its engine would not use the window of a saved one: {error}"
            self.outcomes.set(
                unverified.identity, RestoreOutcome(unverified.model, problem=problem)
            )
            raise
        return replace(unverified, size_bytes=spooled.stat().st_size)

    def check_out(self, manifest: Manifest, spool: Path, key: CacheKey) -> Path:
        """Verify a file and put it into the spool of an engine; return the path there.

        For an engine with another number of slots it is rewritten. The name in the spool is unique
        and begins with the name of the file. The caller deletes it after the engine's answer.

        Raises:
            SlotFileMissing: The file and its manifest were deleted.
            InvalidSlotFile: The file differs from its manifest.
            OSError: The disk is full, read-only, or failed.
        """
        path = self.path(manifest)
        link = spool / f"{manifest.name}.{secrets.token_hex(4)}{_DATA}"
        draft = link.with_suffix(_DRAFT)  # until an engine may have read it
        try:
            self.content.take(path, draft, manifest)
            refit(
                draft,
                manifest.identity.slots,
                key.slots,
                key.state_bytes or 0,
                has_window=key.has_window,
            )
            draft.replace(link)
        except FileNotFoundError as error:
            kind = InvalidSlotFile if path.with_suffix(_MANIFEST).exists() else SlotFileMissing
            raise kind("it is gone") from error
        except OSError as error:
            if error.errno == errno.ESTALE:  # another machine deleted it
                raise SlotFileMissing("it is gone") from error
            if error.errno in _DISK_ERRORS or self.shared:
                raise
            raise InvalidSlotFile(f"it cannot be read: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)
        return link

    def sha256(self, manifest: Manifest) -> bytes:
        """Return the SHA-256 of a file as it is stored. Raises OSError."""
        return bytes.fromhex(files.sha256_of(self.path(manifest)))

    def manifest_text(self, manifest: Manifest) -> str:
        """Return a manifest as it is stored. Raises OSError."""
        return self.path(manifest).with_suffix(_MANIFEST).read_text("utf-8")

    def header(self, manifest: Manifest) -> SlotFileHeader:
        """Read the header of a file; raises InvalidSlotFile if it differs from its manifest."""
        try:
            return self.content.header(self.path(manifest), manifest)
        except OSError as error:
            raise InvalidSlotFile(f"it cannot be read: {error.strerror}") from error

    def quarantine_file(self, manifest: Manifest, reason: str) -> QuarantinedFile:
        self._quarantine(manifest.model, manifest.name)
        return manifest.model, manifest.name, reason

    def forget_files(self, manifests: Iterable[Manifest]) -> None:
        """Delete files, and the quarantine, whose files cannot be mapped to conversations.

        Raises AccessDenied: some may be left.
        """
        with access_denied(f"cannot delete all files in {self.root}"):
            self.drop(manifests)
            self.quarantine.empty()

    def forget(self, model: str | None = None) -> list[Manifest]:
        """Delete and return the saved files of a model, or of all; empty the quarantine.

        Raises AccessDenied: some may be left.
        """
        found = self.list_saved(model)
        self.forget_files(found)
        with access_denied(f"cannot delete all files in {self.root}"):
            if not self.shared:
                for directory in self._directories(model):
                    shutil.rmtree(directory)
        self.outcomes.forget(model)
        return found

    def clean_up(self) -> None:
        """Delete partial files. Only the daemon that owns the directory may call this, at start."""
        for partial in self._spool.glob("*/*.new"):
            partial.unlink(missing_ok=True)
        if self._is_spool_in_memory:
            shutil.rmtree(self._own / _SPOOL, ignore_errors=True)
        if not self.shared:
            self.delete_partial()

    def delete_partial(self) -> None:
        """Delete files without a manifest; of a shared directory, those that nobody writes."""
        for directory in self._directories(None):
            paths = set(directory.iterdir())
            for path in paths:
                if path.with_suffix(_MANIFEST) in paths and path.suffix in _ENDINGS:
                    continue
                if self.shared is None or self.shared.is_abandoned(path):
                    path.unlink(missing_ok=True)
            if not self.shared:
                with suppress(OSError):  # it is not empty
                    directory.rmdir()
        self.quarantine.limit()

    def close(self) -> None:
        """Delete the spool if it is in memory. Call this after the last engine has ended."""
        if self._is_spool_in_memory:
            shutil.rmtree(self._spool, ignore_errors=True)
        if self.shared:
            self.shared.end()

    def _directories(self, model: str | None) -> Iterator[Path]:
        """Yield the directories of a model, or of all. Raises OSError."""
        try:
            self._kept.lstat()  # a disk that fails does not mean that there are none
        except FileNotFoundError:
            return
        if is_ours(self._kept):
            yield from (
                path
                for path in sorted(self._kept.iterdir())
                if path.is_dir() and (model is None or path == self._directory(model))
            )

    def _manifests(self, model: str | None) -> Iterator[Path]:
        for directory in self._directories(model):
            yield from sorted(directory.glob(f"*{_MANIFEST}"))

    def _quarantine(self, model: str, name: str) -> None:
        path = self._directory(model) / name
        self.quarantine.take(path.with_suffix(_DATA), path.with_suffix(_MANIFEST))

    def _put(self, spooled: Path, manifest: Manifest) -> None:
        make_private(self._kept)
        make_private(self._directory(manifest.model))
        self._add(manifest, lambda target: self.content.put(spooled, target, manifest))

    def new_copy(self, manifest: Manifest) -> Path:
        """Make an empty file for a copy of another machine's file. Raises OSError, AccessDenied."""
        make_private(self._own)
        make_private(self._kept)
        directory = make_private(self._directory(manifest.model))
        path = directory / f"{manifest.name}.{secrets.token_hex(4)}{_DRAFT}"
        path.touch(0o600, exist_ok=False)
        return path

    def adopt(self, copy: Path, manifest: Manifest) -> None:
        """Store a copy of another machine's file, as it is stored there. Raises OSError.

        A request waits for it, so not until it is on the disk: if the machine crashes before, the
        file is invalid.
        """
        self._add(manifest, copy.replace, durable=False)

    def _add(
        self, manifest: Manifest, put: Callable[[Path], object], *, durable: bool = True
    ) -> None:
        """Have a file put into its place, and then add its manifest; an error removes it."""
        target, text = self.path(manifest), dump(self.content.seal(manifest))
        try:
            put(target)
            write_atomic(target.with_suffix(_MANIFEST), text, durable=durable)
            set_time(target.with_suffix(_MANIFEST), manifest.used_at)
        except OSError:
            with suppress(OSError):  # the first error says what failed
                self._remove(target)
            raise

    def drop(self, manifests: Iterable[Manifest]) -> None:
        for manifest in manifests:
            self._remove(self.path(manifest))

    def _remove(self, path: Path) -> None:
        # The manifest first: a file without one does not count.
        path.with_suffix(_MANIFEST).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def path(self, manifest: Manifest) -> Path:
        return self._directory(manifest.model) / f"{manifest.name}{_DATA}"

    def _directory(self, model: str) -> Path:
        return self._kept / file_name(model)
