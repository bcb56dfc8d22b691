"""Where slot files are kept: a private directory, a manifest beside each file, a budget over all.

    slots/kept/MODEL/NAME.slot, NAME.json    what may be put back
    slots/spool/INSTANCE/                    where an engine writes, and reads what it is handed
    slots/quarantine/                        what was found altered or foreign, for some days
    slots/disproved.json                     for which caches putting them back was in vain

Names are random and ours; the directories of models bear names that the settings have checked. A
file appears by rename, whole and on the disk, and its manifest after it: what has no manifest does
not count and is swept. Nothing is kept in memory, so commands may work on the same directory as a
daemon. Everything here blocks; call it in a thread.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from supervisor.engine_client.slots import SlotFileInfo
from supervisor.engines.pins import sha256_of
from supervisor.host.files import sync, write_atomic
from supervisor.host.paths import is_ours, make_private
from supervisor.slot_store import slot_file
from supervisor.slot_store.file_check import (
    InvalidSlotFile,
    QuarantinedFile,
    checked_head,
    read_manifest,
)
from supervisor.slot_store.ineffective import IneffectiveRestores
from supervisor.slot_store.manifest import Manifest, SlotOrigin, dump
from supervisor.slot_store.policy import DiskBudget, is_redundant, to_evict
from supervisor.slot_store.quarantine import Quarantine
from supervisor.slot_store.slot_file import NotASlotFile, SlotFileHeader

_DATA: Final = ".slot"
_MANIFEST: Final = ".json"
_ENDINGS: Final = frozenset({_DATA, _MANIFEST})


class SlotStore:
    """The slot files of one data directory.

    Args:
        root: Made when first written to, 0700.

    Attributes:
        root: As given.
        quarantine: What was moved aside.
        disproved: For which caches it is in vain.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._kept = root / "kept"
        self.quarantine = Quarantine(root / "quarantine")
        self.disproved = IneffectiveRestores(root / "disproved.json")

    def spool(self, instance: str) -> Path:
        """Return the directory in which an engine writes and reads, made when missing.

        Raises:
            AccessDenied: It cannot be made.
        """
        make_private(self.root)
        make_private(self.root / "spool")
        return make_private(self.spool_path(instance))

    def spool_path(self, instance: str) -> Path:
        """Return where that directory is, or would be."""
        return self.root / "spool" / instance

    def room_bytes(self) -> int:
        """Return what the disk has free."""
        return shutil.disk_usage(self.root).free

    def saved(self, model: str | None = None) -> list[Manifest]:
        """Return what is kept, of one model or of all; what has no good manifest is left out."""
        found = (read_manifest(path) for path in self._manifests(model))
        return [one for one in found if isinstance(one, Manifest)]

    def quarantine_invalid(self, model: str | None = None) -> list[QuarantinedFile]:
        """Move aside what has a manifest that is not good; return what that was."""
        found = (read_manifest(path) for path in self._manifests(model))
        rejected = [one for one in found if isinstance(one, QuarantinedFile)]
        for one in rejected:
            self._set_aside(one.model, one.name)
        return rejected

    def add(
        self, spooled: Path, label: SlotOrigin, moved: SlotFileInfo, budget: DiskBudget
    ) -> Manifest | None:
        """Take in a file that an engine has written, and drop what it makes superfluous.

        Args:
            spooled: The file; it leaves the spool in any case.
            label: Whose it is.
            moved: What the engine says that it wrote.
            budget: What is kept at most; the least recently used leave for it.

        Returns:
            What is kept; None where it would add nothing to what is.

        Raises:
            Unfit: It is not what the engine says; nothing was kept.
            OSError: The disk refused; nothing was kept.
        """
        try:
            head = checked_head(spooled, moved)
            others = self._of_its_kind(label)
            is_superfluous, leaving = is_redundant(head, label.used_at, others, budget.tokens_min)
            if is_superfluous:
                return None
            manifest = label.manifest(spooled.stem, moved, head, sha256_of(spooled))
            self._put(spooled, manifest)
        finally:
            spooled.unlink(missing_ok=True)
        self._drop(leaving)
        self._drop(to_evict(self.saved(), budget))
        return manifest

    def check_out(self, manifest: Manifest, spool: Path) -> Path:
        """Verify a file and hand it to an engine by a link in its spool; return the link.

        The link is left there until the engine has answered: one that is found later is of a file
        that an engine did not survive.

        Raises:
            Unfit: It is not what the manifest says.
        """
        path = self._path(manifest)
        try:
            head = checked_head(path, SlotFileInfo(manifest.tokens, manifest.size_bytes))
            if (head.digest, sha256_of(path)) != (manifest.tokens_sha256, manifest.sha256):
                raise InvalidSlotFile("its content was altered")
            link = spool / path.name
            os.link(path, link)
        except OSError as error:
            raise InvalidSlotFile(f"it cannot be read: {error.strerror}") from error
        return link

    def head(self, manifest: Manifest) -> SlotFileHeader:
        """Return the head of a file.

        Raises:
            NotASlotFile, OSError: It is none any more, or gone.
        """
        return slot_file.read(self._path(manifest))

    def quarantine_file(self, one: Manifest, reason: str) -> QuarantinedFile:
        """Move a file and its manifest into quarantine."""
        self._set_aside(one.model, one.name)
        return QuarantinedFile(one.model, one.name, reason)

    def forget(self, model: str | None = None) -> list[Manifest]:
        """Delete what is kept of a model, or of all, and whatever is in quarantine; try all again.

        Returns:
            What was kept.
        """
        found = self.saved(model)
        for directory in self._directories(model):
            shutil.rmtree(directory)
        self.quarantine.empty()
        self.disproved.forget(model)
        return found

    def clean_up(self, budget: DiskBudget) -> list[QuarantinedFile]:
        """Put in order what a daemon that died left: half files, what is beyond the budget.

        Only the daemon that owns the directory may call it, before it runs an engine.

        Returns:
            What was moved aside.
        """
        for half in self.root.glob("spool/*/*.new"):
            half.unlink(missing_ok=True)
        for directory in self._directories(None):
            for path in directory.iterdir():
                if not path.with_suffix(_MANIFEST).exists() or path.suffix not in _ENDINGS:
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # it is not empty
                directory.rmdir()
        rejected = self.quarantine_invalid()
        self._drop(to_evict(self.saved(), budget))
        self.quarantine.bound()
        return rejected

    def _directories(self, model: str | None) -> Iterator[Path]:
        if is_ours(self._kept):
            yield from (
                path
                for path in sorted(self._kept.iterdir())
                if path.is_dir() and model in {None, path.name}
            )

    def _manifests(self, model: str | None) -> Iterator[Path]:
        for directory in self._directories(model):
            yield from sorted(directory.glob(f"*{_MANIFEST}"))

    def _set_aside(self, model: str, name: str) -> None:
        path = self._kept / model / name
        self.quarantine.take(path.with_suffix(_DATA), path.with_suffix(_MANIFEST))

    def _of_its_kind(self, label: SlotOrigin) -> dict[Manifest, SlotFileHeader]:
        """Return what is kept for the same identity, with the tokens that each holds."""
        found = {}
        for one in self.saved(label.model):
            if one.identity == label.identity:
                with suppress(NotASlotFile, OSError):  # it is found out before it is put back
                    found[one] = self.head(one)
        return found

    def _put(self, spooled: Path, manifest: Manifest) -> None:
        make_private(self._kept)
        target = make_private(self._kept / manifest.model) / f"{manifest.name}{_DATA}"
        try:
            spooled.chmod(0o600)
            sync(spooled)
            spooled.replace(target)
            write_atomic(target.with_suffix(_MANIFEST), dump(manifest))
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def _drop(self, leaving: Iterable[Manifest]) -> None:
        for one in leaving:
            path = self._path(one)
            # The manifest first: without one a file does not count.
            path.with_suffix(_MANIFEST).unlink(missing_ok=True)
            path.unlink(missing_ok=True)

    def _path(self, manifest: Manifest) -> Path:
        return self._kept / manifest.model / f"{manifest.name}{_DATA}"
