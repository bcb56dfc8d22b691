"""Looks at a slot file and its manifest, and says what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from supervisor.fleet.slots import header
from supervisor.fleet.slots.header import Head, NoSlotFile
from supervisor.fleet.slots.manifest import Manifest, ManifestInvalid, load
from supervisor.life.slots import Moved


class Unfit(Exception):
    """A file must not be shown to an engine; says why."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file that was moved into quarantine.

    Attributes:
        model: The model under whose name it lay.
        name: Its name.
        why: A clause.
    """

    model: str
    name: str
    why: str


def read_manifest(path: Path) -> Manifest | Rejected | None:
    """Return a manifest, or what is wrong with it; None where it is gone meanwhile."""
    try:
        found = load(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (ManifestInvalid, OSError, UnicodeDecodeError) as error:
        return Rejected(path.parent.name, path.stem, str(error))
    if (found.name, found.model) != (path.stem, path.parent.name):
        return Rejected(path.parent.name, path.stem, "its manifest is that of another file")
    return found


def checked_head(path: Path, moved: Moved) -> Head:
    """Return the head of a file that has the size and the number of tokens it should have.

    Raises:
        Unfit: It has not.
        OSError: It cannot be read.
    """
    if (size_bytes := path.stat().st_size) != moved.size_bytes:
        raise Unfit(f"it has {size_bytes:,} bytes, not {moved.size_bytes:,}")
    try:
        head = header.read(path)
    except NoSlotFile as error:
        raise Unfit(str(error)) from error
    if len(head.tokens) != moved.tokens:
        raise Unfit(f"it holds {len(head.tokens):,} tokens, not {moved.tokens:,}")
    return head
