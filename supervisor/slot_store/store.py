"""Slot files on disk: a private directory, a manifest beside each file, a budget over all.

    slots/kept/MODEL/NAME.slot, NAME.json    saved slots
    slots/spool/INSTANCE/                    where an engine writes and reads; elsewhere in memory
                                             where files are encrypted
    slots/quarantine/                        invalid files, for some days
    slots/outcomes.json                      what engines did with restored slots

File names are random; a directory is named by `file_name` of its model or instance. A file appears
by rename, whole and on the disk, and its manifest after it: a file without a manifest does not
count. Commands may use the directory beside a daemon, which has a `catalogue` of it in memory. All
methods block; call them in a thread.
"""

from __future__ import annotations

import errno
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

from supervisor.engine_client.slots import SlotFileInfo
from supervisor.host.files import write_atomic
from supervisor.host.paths import file_name, is_ours, make_private
from supervisor.slot_store.content import PLAIN, SlotContent
from supervisor.slot_store.manifest import CacheKey, Manifest, dump
from supervisor.slot_store.manifest_file import read_manifest, set_time
from supervisor.slot_store.outcomes import RestoreOutcomes
from supervisor.slot_store.policy import is_redundant
from supervisor.slot_store.quarantine import Quarantine, QuarantinedFile
from supervisor.slot_store.slot_count import refit
from supervisor.slot_store.slot_file import (
    InvalidSlotFile,
    SlotFileHeader,
    SlotFileMissing,
    read_checked,
)

_DATA: Final = ".slot"
_MANIFEST: Final = ".json"
# Left free on the disk, whatever the budget.
_RESERVE_BYTES: Final = 256 * 1024**2
_MEMORY_RESERVE_BYTES: Final = 16 * 1024**2
_SPOOL: Final = "spool"
_NOT_OF_THE_FILE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE}
)
_ENDINGS: Final = frozenset({_DATA, _MANIFEST})


class SlotStore:
    """The slot files of one data directory, made with mode 0700 when first written to.

    Args:
        content: Encrypts the files; unset: they are not.
        spool: Where engines write and read; unset: a directory in `root`.
    """

    def __init__(self, root: Path, content: SlotContent = PLAIN, spool: Path | None = None) -> None:
        self.root = root
        self.content = content
        self._spool = spool or root / _SPOOL
        self._is_spool_in_memory = spool is not None
        self._kept = root / "kept"
        self.quarantine = Quarantine(root / "quarantine")
        self.outcomes = RestoreOutcomes(root)

    def spool(self, instance: str) -> Path:
        """Make the directory in which an engine writes and reads.

        Raises:
            AccessDenied: It cannot be made.
        """
        make_private(self.root)
        make_private(self._spool)
        return make_private(self.spool_path(instance))

    def spool_path(self, instance: str) -> Path:
        return self._spool / file_name(instance)

    def room_bytes(self) -> int:
        """Return the size of the largest file for which there is room, less a reserve."""
        return min(self.rooms_bytes().values())

    def rooms_bytes(self) -> dict[str, int]:
        """Return the room of the disk, and of the spool if that is in memory, by name."""
        rooms = {"the disk": shutil.disk_usage(self.root).free - _RESERVE_BYTES}
        if self._is_spool_in_memory:
            free_bytes = shutil.disk_usage(self._spool).free
            rooms[f"the memory of {self._spool}"] = free_bytes - _MEMORY_RESERVE_BYTES
        return rooms

    def saved(self, model: str | None = None) -> list[Manifest]:
        """Return what is saved of a model or of all, without invalid manifests."""
        found = (read_manifest(path) for path in self._manifests(model))
        return [self.content.opened(one) for one in found if isinstance(one, Manifest)]

    def mark_used(self, manifest: Manifest, now: datetime) -> None:
        """Remember when a file was used; one that is gone is not an error."""
        with suppress(OSError):
            set_time(self._path(manifest).with_suffix(_MANIFEST), now)

    def read_new(
        self, known: Collection[str]
    ) -> tuple[set[str], list[Manifest], list[QuarantinedFile]]:
        """Return the names of all files and the manifests of those not known.

        Those that are invalid are quarantined, and returned last.
        """
        paths = list(self._manifests(None))
        found = [read_manifest(path) for path in paths if path.stem not in known]
        invalid = [one for one in found if isinstance(one, QuarantinedFile)]
        for one in invalid:
            self._quarantine(one.model, one.name)
        new = [self.content.opened(one) for one in found if isinstance(one, Manifest)]
        return {path.stem for path in paths}, new, invalid

    def add(
        self, spooled: Path, unverified: Manifest, others: Iterable[Manifest], tokens_min: int
    ) -> tuple[Manifest | None, list[Manifest]]:
        """Move a file from the spool; return its whole manifest, and which others it replaces.

        `others` are compared with it token by token; None: one of them makes it redundant.

        Raises:
            InvalidSlotFile: It is not what the engine reported; nothing was stored.
            OSError: The disk refused; nothing was stored.
        """
        try:
            header = _read_header(spooled, unverified)
            headers = self._headers(others)
            redundant, replaced = is_redundant(header, unverified.used_at, headers, tokens_min)
            if redundant:
                return None, []
            manifest = self.content.completed(unverified, spooled, header)
            self._put(spooled, manifest)
        finally:
            spooled.unlink(missing_ok=True)
        return manifest, replaced

    def check_out(self, manifest: Manifest, spool: Path, key: CacheKey) -> Path:
        """Verify a file and put it into the spool of an engine, until the engine has answered.

        For an engine with another number of slots it is rewritten. The link begins with the name
        of the file; each has a name of its own.

        Raises:
            SlotFileMissing: It was deleted, and its manifest.
            InvalidSlotFile: It differs from its manifest.
            OSError: The disk refused, full or read-only.
        """
        path = self._path(manifest)
        link = spool / f"{manifest.name}.{secrets.token_hex(4)}{_DATA}"
        try:
            self.content.take(path, link, manifest)
            refit(link, manifest.identity.slots, key.slots, key.state_bytes or 0)
        except FileNotFoundError as error:
            is_listed = path.with_suffix(_MANIFEST).exists()
            kind = InvalidSlotFile if is_listed else SlotFileMissing
            raise kind("it is gone") from error
        except OSError as error:
            if error.errno in _NOT_OF_THE_FILE:
                raise
            raise InvalidSlotFile(f"it cannot be read: {error.strerror}") from error
        return link

    def header(self, manifest: Manifest) -> SlotFileHeader:
        """Read what a file holds, without its content.

        Raises:
            InvalidSlotFile: It differs from its manifest.
        """
        try:
            return self.content.header(self._path(manifest), manifest)
        except OSError as error:
            raise InvalidSlotFile(f"it cannot be read: {error.strerror}") from error

    def quarantine_file(self, one: Manifest, reason: str) -> QuarantinedFile:
        self._quarantine(one.model, one.name)
        return QuarantinedFile(one.model, one.name, reason)

    def forget_files(self, manifests: Iterable[Manifest]) -> None:
        """Delete files, and the quarantine: nobody knows of which conversations that is."""
        self.drop(manifests)
        self.quarantine.empty()

    def forget(self, model: str | None = None) -> list[Manifest]:
        """Delete and return what is saved of a model or of all; empty the quarantine."""
        found = self.saved(model)
        for directory in self._directories(model):
            shutil.rmtree(directory)
        self.quarantine.empty()
        self.outcomes.forget(model)
        return found

    def clean_up(self) -> None:
        """Delete partial files; only for the daemon that owns the directory, before it serves."""
        for partial in self._spool.glob("*/*.new"):
            partial.unlink(missing_ok=True)
        if self._is_spool_in_memory:
            shutil.rmtree(self.root / _SPOOL, ignore_errors=True)
        for directory in self._directories(None):
            for path in directory.iterdir():
                if not path.with_suffix(_MANIFEST).exists() or path.suffix not in _ENDINGS:
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                directory.rmdir()
        self.quarantine.bound()

    def empty_memory(self) -> None:
        """Delete the spool if it is in memory; only after the last engine ended."""
        if self._is_spool_in_memory:
            shutil.rmtree(self._spool, ignore_errors=True)

    def _directories(self, model: str | None) -> Iterator[Path]:
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

    def _headers(self, manifests: Iterable[Manifest]) -> dict[Manifest, SlotFileHeader]:
        found = {}
        for one in manifests:
            with suppress(InvalidSlotFile, OSError):  # found before it is restored
                found[one] = self.content.header(self._path(one), one)
        return found

    def _put(self, spooled: Path, manifest: Manifest) -> None:
        make_private(self._kept)
        target = make_private(self._directory(manifest.model)) / f"{manifest.name}{_DATA}"
        try:
            self.content.put(spooled, target, manifest)
            write_atomic(target.with_suffix(_MANIFEST), dump(self.content.sealed(manifest)))
            set_time(target.with_suffix(_MANIFEST), manifest.used_at)
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def drop(self, manifests: Iterable[Manifest]) -> None:
        """Delete files."""
        for one in manifests:
            path = self._path(one)
            # The manifest first: a file without one does not count.
            path.with_suffix(_MANIFEST).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def _path(self, manifest: Manifest) -> Path:
        return self._directory(manifest.model) / f"{manifest.name}{_DATA}"

    def _directory(self, model: str) -> Path:
        return self._kept / file_name(model)


def _read_header(path: Path, manifest: Manifest) -> SlotFileHeader:
    return read_checked(path, SlotFileInfo(manifest.tokens, manifest.size_bytes))
