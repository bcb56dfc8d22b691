"""Writes values into settings files, and remembers them so that they can be taken back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from supervisor.clients import formats
from supervisor.clients.client import (
    ABSENT,
    KEY_VARIABLE,
    ClientProgram,
    Facts,
    FileFormat,
    FileSettings,
    Place,
    as_json,
    from_json,
)


@dataclass(frozen=True, slots=True)
class Texts:
    """Functions that read and change a format.

    All raise ValueError for a text of another format, TypeError for an impossible place.
    """

    read: Callable[[str, Place], Any]  # returns the value at a place, or ABSENT
    put: Callable[[str, Place, Any], str]  # returns the text with a value at a place
    # Returns the text without the value at a place, which must exist.
    drop: Callable[[str, Place], str]


_TEXTS: Final[Mapping[FileFormat, Texts]] = MappingProxyType(
    {
        "json": Texts(formats.read_json, formats.put_json, formats.drop_json),
        "toml": Texts(formats.read_toml, formats.put_toml, formats.drop_toml),
        "yaml": Texts(formats.read_yaml, formats.put_yaml, formats.drop_yaml),
        "env": Texts(formats.read_env, formats.put_env, formats.drop_env),
    }
)


def texts_of(file_format: FileFormat) -> Texts:
    return _TEXTS[file_format]


def text_of(settings: FileSettings) -> str:
    """Return the text of a new file with these settings."""
    texts, text = texts_of(settings.format), ""
    for place, value in {**settings.defaults, **settings.values}.items():
        text = texts.put(text, place, value)
    return text


def notes_of(client: ClientProgram, facts: Facts) -> Sequence[str]:
    """Return what else the user must do, a sentence each."""
    notes = []
    model = facts.model
    if model.context_tokens is not None and model.context_tokens < client.context_least:
        from supervisor.settings.edit import key_text  # noqa: PLC0415 (tomlkit takes memory)

        flags = key_text(("models", model.name, "flags"))
        notes.append(
            f"{model.name} has a context of {model.context_tokens} tokens, and the prompt of "
            f"{client.title} takes some 10000: choose a model with {client.context_least} or more, "
            f"or raise ctx-size under [{flags}] if the model was trained for it"
        )
    if facts.needs_key:
        same = client.key_variable == KEY_VARIABLE
        source = "" if same else f' (export {client.key_variable}="${KEY_VARIABLE}")'
        notes.append(f"{client.title} reads the API key from {client.key_variable}{source}")
    if facts.certificate and not client.writes_ca:
        notes.append(
            f"{client.title} must trust the certificate: "
            f"export {client.ca_variable}={facts.certificate}"
        )
    elif facts.url.startswith("https:") and not facts.certificate:
        notes.append(
            "if no public CA issued the certificate, the client must trust the CA that did: "
            f"export {client.ca_variable}=FILE.pem"
        )
    return notes


_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Entry:
    place: Place
    written: Any
    before: Any  # the file's value before, or ABSENT
    kept: int  # how many steps of the place existed before
    # The file needs some value here; it is removed only if nothing else remains.
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class FileEntries:
    """The written values of one file; `is_new` if we made the file."""

    path: Path
    format: FileFormat
    entries: tuple[Entry, ...]
    is_new: bool


def apply_file_settings(
    text: str, wanted: FileSettings, earlier: FileEntries | None, *, is_new: bool
) -> tuple[str, FileEntries]:
    """Return the text with the wanted values, and the entries to remember; raises ValueError.

    Values of an earlier call are taken back first, so that the values before it are remembered.
    """
    if earlier:
        text, is_new = undo_entries(text, earlier)[0], earlier.is_new
    texts, entries = texts_of(wanted.format), []
    defaults = {
        place: value
        for place, value in wanted.defaults.items()
        if texts.read(text, place) is ABSENT
    }
    for place, value in {**defaults, **wanted.values}.items():
        before = texts.read(text, place)
        depths = range(len(place), 0, -1)
        kept = next((depth for depth in depths if texts.read(text, place[:depth]) is not ABSENT), 0)
        entries.append(Entry(place, value, before, kept, is_default=place in defaults))
        text = texts.put(text, place, value)
    return text, FileEntries(wanted.path, wanted.format, tuple(entries), is_new)


def undo_entries(text: str, written: FileEntries) -> tuple[str, tuple[Place, ...]]:
    """Take back the written values; return the text, and the places changed since, which stay.

    Raises ValueError.
    """
    ours = [entry for entry in reversed(written.entries) if not entry.is_default]
    defaults = [entry for entry in written.entries if entry.is_default]
    text, left = _undo_each(text, written, ours)
    bare, _ = _undo_each(text, written, defaults)
    return (bare if is_empty(bare) or not written.is_new else text), left


def _undo_each(
    text: str, written: FileEntries, entries: Sequence[Entry]
) -> tuple[str, tuple[Place, ...]]:
    texts, left = texts_of(written.format), list[Place]()
    for entry in entries:
        now = texts.read(text, entry.place)
        if now is ABSENT:
            continue
        if now != entry.written:
            left.append(entry.place)
        elif entry.before is ABSENT:
            text = _remove_entry(texts, text, entry)
        else:
            text = texts.put(text, entry.place, entry.before)
    return text, tuple(left)


def is_empty(text: str) -> bool:
    """Return whether a file has no values, in any of the formats."""
    return "".join(text.split()) in {"", "{}", "[]"}


def _remove_entry(texts: Texts, text: str, entry: Entry) -> str:
    """Remove a value, and the tables that led to it and are empty now."""
    text = texts.drop(text, entry.place)
    for depth in range(len(entry.place) - 1, entry.kept, -1):
        if texts.read(text, entry.place[:depth]) not in ({}, []):
            break
        text = texts.drop(text, entry.place[:depth])
    return text


def to_json(files: Sequence[FileEntries]) -> dict[str, Any]:
    return {
        "version": _VERSION,
        "files": [
            {
                "path": str(file.path),
                "format": file.format,
                "is_new": file.is_new,
                "entries": [
                    {
                        "place": as_json(entry.place),
                        "written": entry.written,
                        "kept": entry.kept,
                        "is_default": entry.is_default,
                        **({} if entry.before is ABSENT else {"before": entry.before}),
                    }
                    for entry in file.entries
                ],
            }
            for file in files
        ],
    }


def read_json(content: Mapping[str, Any]) -> list[FileEntries]:
    """Return what `to_json` wrote; raises the errors of reading another format."""
    if content["version"] != _VERSION:
        raise ValueError(f"version {content['version']}")
    if unknown := {file["format"] for file in content["files"]} - _TEXTS.keys():
        raise ValueError(f"formats {unknown}")
    return [
        FileEntries(
            Path(file["path"]),
            file["format"],
            tuple(
                Entry(
                    from_json(entry["place"]),
                    entry["written"],
                    entry.get("before", ABSENT),
                    int(entry["kept"]),
                    is_default=bool(entry["is_default"]),
                )
                for entry in file["entries"]
            ),
            bool(file["is_new"]),
        )
        for file in content["files"]
    ]
