"""`corral config set|unset`: one setting of corral.toml, with its comments kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from proxy.config.toml_text import parse_toml
from supervisor.errors import SettingsInvalid
from supervisor.host.paths import directories
from supervisor.host.toml_file import read_toml
from supervisor.output import CommandResult
from supervisor.settings.change import key_parts, values_of, with_value, without_value
from supervisor.settings.edit import Edit, write_file
from supervisor.settings.load import FILE_NAME, find_file, merge, restart_changes
from supervisor.settings.schema import Settings


def set_value(key: str, word: str, config: Path | None) -> CommandResult:
    """Set one value; the file is made where there is none."""
    parts = key_parts(key)
    path = _file(config) or directories().config / FILE_NAME

    def edit(text: str) -> Edit:
        return _first_valid((with_value(text, parts, value) for value in values_of(word)), path)

    return _write(path, edit, parts)


def unset_value(key: str, config: Path | None) -> CommandResult:
    """Take a value or a table out of the file."""
    parts = key_parts(key)
    path = _file(config)
    if path is None:
        raise SettingsInvalid("there is no settings file", hint="corral config path shows where")

    def edit(text: str) -> Edit:
        return _first_valid([without_value(text, parts)], path)

    return _write(path, edit, parts)


def _file(config: Path | None) -> Path | None:
    return find_file(config, config_dir=directories().config, environ=os.environ)


def _first_valid(edits: Iterable[Edit], path: Path) -> Edit:
    """Return the first edit that leaves valid settings; raises what is wrong with the first."""
    errors = []
    for edit in edits:
        try:
            merge(parse_toml(edit.text.encode()), path)
        except SettingsInvalid as error:
            errors.append(error)
        else:
            return edit
    raise SettingsInvalid(
        errors[0].message, hint="nothing was changed; corral config show lists every setting"
    )


def _write(path: Path, edit: Callable[[str], Edit], parts: tuple[str, ...]) -> CommandResult:
    before = _settings(path)
    made = write_file(path, edit)
    data = {"file": str(path), "lines": made.lines}
    text = "\n".join(f"{path}: {line}" for line in made.lines)
    return CommandResult(data, text, tuple(_notes(path, before, ".".join(parts))))


def _settings(path: Path) -> Settings | None:
    """Return what a file says now, or None if there is none or it is not valid."""
    try:
        return merge(read_toml(path), path).settings
    except SettingsInvalid:
        return None


def _notes(path: Path, before: Settings | None, key: str) -> Iterator[str]:
    loaded = merge(read_toml(path), path)
    if loaded.origins.get(key) == "environment":
        yield f"the environment sets {key} too, and wins"
    if not directories().control_socket.exists():
        return
    if any(restart_changes(before or Settings(), loaded.settings)):
        yield "a daemon runs: it takes a restart (corral stop, then corral start) to apply it"
    else:
        yield "a daemon runs: corral reload applies it"
