"""`corral config set|unset`: one setting of corral.toml, with its comments kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from proxy.config.toml_text import parse_toml
from supervisor.errors import SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.settings.change import key_parts, values_of, with_value, without_value
from supervisor.settings.edit import Edit, write_file
from supervisor.settings.load import FILE_NAME, find_file, merge


def set_value(key: str, word: str, config: Path | None) -> CommandResult:
    """Set one value; the file is made where there is none."""
    parts = key_parts(key)
    path = _file(config) or directories().config / FILE_NAME

    def edit(text: str) -> Edit:
        return _first_valid((with_value(text, parts, value) for value in values_of(word)), path)

    return _shown(path, write_file(path, edit), parts)


def unset_value(key: str, config: Path | None) -> CommandResult:
    """Take a value or a table out of the file."""
    parts = key_parts(key)
    path = _file(config)
    if path is None:
        raise SettingsInvalid("there is no settings file", hint="corral config path shows where")

    def edit(text: str) -> Edit:
        return _first_valid([without_value(text, parts)], path)

    return _shown(path, write_file(path, edit), parts)


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


def _shown(path: Path, edit: Edit, parts: tuple[str, ...]) -> CommandResult:
    data = {"file": str(path), "lines": edit.lines}
    text = "\n".join(f"{path}: {line}" for line in edit.lines)
    return CommandResult(data, text, tuple(_notes(path, ".".join(parts))))


def _notes(path: Path, key: str) -> Iterator[str]:
    if merge(parse_toml(path.read_bytes()), path).origins.get(key) == "environment":
        yield f"the environment sets {key} too, and wins"
    if directories().control_socket.exists():
        yield "a daemon runs: corral reload applies it"
