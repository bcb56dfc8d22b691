"""Writes values into settings files, and remembers them so that they can be taken back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pydantic import TypeAdapter

from supervisor.clients import formats
from supervisor.clients.client import (
    ABSENT,
    KEY_VARIABLE,
    ClientProgram,
    Facts,
    FileFormat,
    FileSettings,
    Place,
)

# For each format, functions that return the value at a place or ABSENT, the text with a value at a
# place, and the text without the value at a place, which must exist. All raise ValueError for a
# text of another format, TypeError for an impossible place.
Texts = tuple[
    Callable[[str, Place], Any], Callable[[str, Place, Any], str], Callable[[str, Place], str]
]
TEXTS: Final[Mapping[FileFormat, Texts]] = MappingProxyType(
    {
        "json": (formats.read_json, formats.put_json, formats.drop_json),
        "toml": (formats.read_toml, formats.put_toml, formats.drop_toml),
        "yaml": (formats.read_yaml, formats.put_yaml, formats.drop_yaml),
        "env": (formats.read_env, formats.put_env, formats.drop_env),
    }
)


def text_of(settings: FileSettings) -> str:
    """Return the text of a new file with these settings."""
    text, (_, put, _) = "", TEXTS[settings.format]
    for place, value in {**settings.defaults, **settings.values}.items():
        text = put(text, place, value)
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


@dataclass(frozen=True, slots=True)
class Entry:
    place: Place
    written: Any
    before: tuple[Any, ...]  # the file's value before; empty if it had none
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
    entries, (read, put, _) = [], TEXTS[wanted.format]
    places = wanted.defaults.items()
    defaults = {place: value for place, value in places if read(text, place) is ABSENT}
    for place, value in {**defaults, **wanted.values}.items():
        now, depths = read(text, place), range(len(place), 0, -1)
        kept = next((depth for depth in depths if read(text, place[:depth]) is not ABSENT), 0)
        before = () if now is ABSENT else (now,)
        entries.append(Entry(place, value, before, kept, is_default=place in defaults))
        text = put(text, place, value)
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
    left, (read, put, _) = list[Place](), TEXTS[written.format]
    for entry in entries:
        now = read(text, entry.place)
        if now is ABSENT:
            continue
        if now != entry.written:
            left.append(entry.place)
        elif entry.before:
            text = put(text, entry.place, entry.before[0])
        else:
            text = _remove_entry(TEXTS[written.format], text, entry)
    return text, tuple(left)


def is_empty(text: str) -> bool:
    """Return whether a file has no values, in any of the formats."""
    return "".join(text.split()) in {"", "{}", "[]"}


def _remove_entry(texts: Texts, text: str, entry: Entry) -> str:
    """Remove a value, and the tables that led to it and are empty now."""
    read, _, drop = texts
    text = drop(text, entry.place)
    for depth in range(len(entry.place) - 1, entry.kept, -1):
        if read(text, entry.place[:depth]) not in ({}, []):
            break
        text = drop(text, entry.place[:depth])
    return text


# Converts the entries of a client's files to JSON, and back.
JOURNAL: Final = TypeAdapter(list[FileEntries])
