"""Looks at a slot file and its manifest, and says what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from supervisor.engine_client.slots import SlotFileInfo
from supervisor.slot_store import slot_file
from supervisor.slot_store.manifest import Manifest, ManifestInvalid, load
from supervisor.slot_store.slot_file import NotASlotFile, SlotFileHeader


class InvalidSlotFile(Exception):
    """A file must not be shown to an engine; says why."""


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    """A file that was moved into quarantine.

    Attributes:
        model: The model under whose name it lay.
        name: Its name.
        reason: A clause.
    """

    model: str
    name: str
    reason: str


def read_manifest(path: Path) -> Manifest | QuarantinedFile | None:
    """Return a manifest, or what is wrong with it; None where it is gone meanwhile."""
    try:
        found = load(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ManifestInvalid, OSError, UnicodeDecodeError) as error:
        return QuarantinedFile(path.parent.name, path.stem, str(error))
    if (found.name, found.model) != (path.stem, path.parent.name):
        return QuarantinedFile(path.parent.name, path.stem, "its manifest is that of another file")
    return found


def checked_head(path: Path, moved: SlotFileInfo) -> SlotFileHeader:
    """Return the head of a file that has the size and the number of tokens it should have.

    Raises:
        Unfit: It has not.
        OSError: It cannot be read.
    """
    if (size_bytes := path.stat().st_size) != moved.size_bytes:
        raise InvalidSlotFile(f"it has {size_bytes:,} bytes, not {moved.size_bytes:,}")
    try:
        head = slot_file.read(path)
    except NotASlotFile as error:
        raise InvalidSlotFile(str(error)) from error
    if len(head.tokens) != moved.tokens:
        raise InvalidSlotFile(f"it holds {len(head.tokens):,} tokens, not {moved.tokens:,}")
    return head
