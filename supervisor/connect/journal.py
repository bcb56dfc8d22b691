"""What was written into settings files, so that it can be taken back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import FileFormat, FileSettings
from supervisor.connect.formats.texts import Texts, texts_of
from supervisor.connect.place import ABSENT, Place, as_json, from_json

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """One value.

    Attributes:
        before: What the file had before, or ABSENT.
        kept: How many steps of the place led to something before.
        is_default: A file needs one; in a file that was made, it goes only with all else.
    """

    place: Place
    written: Any
    before: Any
    kept: int
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The values of one file; `is_new`: there was none before."""

    path: Path
    format: FileFormat
    entries: tuple[Entry, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class Undone:
    """The text without what was written; `left` are places that were changed since."""

    text: str
    left: tuple[Place, ...]


def applied(
    text: str, wanted: FileSettings, earlier: FileEntries | None, *, is_new: bool
) -> tuple[str, FileEntries]:
    """Return the text with the wanted values, and what to remember.

    What an earlier call wrote is taken back first, so that the values before it are kept.

    Raises:
        ValueError: The text has another format.
    """
    if earlier:
        text, is_new = undone(text, earlier).text, earlier.is_new
    texts, entries = texts_of(wanted.format), []
    defaults = {
        place: value
        for place, value in wanted.defaults.items()
        if texts.read(text, place) is ABSENT
    }
    for place, value in {**defaults, **wanted.values}.items():
        before = texts.read(text, place)
        kept = _kept(texts, text, place)
        entries.append(Entry(place, value, before, kept, is_default=place in defaults))
        text = texts.put(text, place, value)
    return text, FileEntries(wanted.path, wanted.format, tuple(entries), is_new)


def undone(text: str, written: FileEntries) -> Undone:
    """Return the text as it was; what was changed since stays. Raises ValueError."""
    ours = [entry for entry in reversed(written.entries) if not entry.is_default]
    defaults = [entry for entry in written.entries if entry.is_default]
    found = _undone(text, written, ours)
    bare = _undone(found.text, written, defaults)
    return Undone(bare.text, found.left) if is_empty(bare.text) or not written.is_new else found


def _undone(text: str, written: FileEntries, entries: Sequence[Entry]) -> Undone:
    texts, left = texts_of(written.format), []
    for entry in entries:
        now = texts.read(text, entry.place)
        if now is ABSENT:
            continue
        if now != entry.written:
            left.append(entry.place)
        elif entry.before is ABSENT:
            text = _without(texts, text, entry)
        else:
            text = texts.put(text, entry.place, entry.before)
    return Undone(text, tuple(left))


def is_empty(text: str) -> bool:
    """Return whether a file says nothing, in any of the formats."""
    return "".join(text.split()) in {"", "{}", "[]"}


def _kept(texts: Texts, text: str, place: Place) -> int:
    depths = range(len(place), 0, -1)
    return next((one for one in depths if texts.read(text, place[:one]) is not ABSENT), 0)


def _without(texts: Texts, text: str, entry: Entry) -> str:
    """Remove a value, and what led to it and is empty now."""
    text = texts.drop(text, entry.place)
    for depth in range(len(entry.place) - 1, entry.kept, -1):
        if texts.read(text, entry.place[:depth]) not in ({}, []):
            break
        text = texts.drop(text, entry.place[:depth])
    return text


def to_json(files: Sequence[FileEntries]) -> dict[str, Any]:
    return {"version": _VERSION, "files": [_file_json(one) for one in files]}


def _file_json(file: FileEntries) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "format": file.format.value,
        "is_new": file.is_new,
        "entries": [_entry_json(one) for one in file.entries],
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    before = {} if entry.before is ABSENT else {"before": entry.before}
    place = as_json(entry.place)
    return {
        "place": place,
        "written": entry.written,
        "kept": entry.kept,
        "is_default": entry.is_default,
        **before,
    }


def read_json(content: Mapping[str, Any]) -> list[FileEntries]:
    """Return what `to_json` wrote; raises what reading another format raises."""
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']}")
    return [
        FileEntries(
            Path(one["path"]),
            FileFormat(one["format"]),
            tuple(map(_entry, one["entries"])),
            bool(one["is_new"]),
        )
        for one in content["files"]
    ]


def _entry(content: Mapping[str, Any]) -> Entry:
    before = content.get("before", ABSENT)
    return Entry(
        from_json(content["place"]),
        content["written"],
        before,
        int(content["kept"]),
        is_default=bool(content["is_default"]),
    )
