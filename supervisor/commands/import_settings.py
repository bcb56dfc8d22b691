"""`corral import`: settings of other programs as corral.toml."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import tomlkit

from proxy.config.toml_text import parse_toml
from supervisor.conversion.converted import Converted
from supervisor.conversion.source import SourceKind, convert, kind_of, read_file
from supervisor.conversion.text import render
from supervisor.errors import SettingsInvalid
from supervisor.host.files import expanded
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.settings.edit import Edit, Table, change_file, edited, write_file
from supervisor.settings.load import FILE_NAME, find_file, merge

_STDIN: Final = "-"
_STDIN_MAX: Final = 1024**2


def import_settings(
    words: Sequence[str], kind: SourceKind | None, config: Path | None, *, is_written: bool
) -> CommandResult:
    """Convert a file, standard input or a command line; write it into corral.toml if asked."""
    converted = _converted(words, kind)
    text = render(converted)
    data = {
        "source": converted.source,
        "models": [one.name for one in converted.models],
        "not taken over": _notes(converted),
        "toml": text,
    }
    if is_written:
        return _written(converted, text, data, config)
    problems = _problems(text, None)
    return CommandResult(data, text.rstrip(), (*_notes(converted), *problems))


def _converted(words: Sequence[str], kind: SourceKind | None) -> Converted:
    if len(words) == 1 and (words[0] == _STDIN or expanded(Path(words[0])).is_file()):
        path = expanded(Path(words[0]))
        is_stdin = words[0] == _STDIN
        text = sys.stdin.read(_STDIN_MAX) if is_stdin else read_file(path)
        base = Path.cwd() if is_stdin else path.absolute().parent
        return convert(text, kind or kind_of(text), base, os.environ)
    if len(words) == 1 and " " not in words[0]:
        raise SettingsInvalid(
            f"there is no file {words[0]}",
            hint="a command line follows two dashes: corral import -- llama-server -m FILE.gguf",
        )
    text = words[0] if len(words) == 1 else shlex.join(words)
    return convert(text, kind or "command", Path.cwd(), os.environ)


def _notes(converted: Converted) -> tuple[str, ...]:
    of_models = (f"{one.name}: {note}" for one in converted.models for note in one.notes)
    return tuple(f"not taken over: {note}" for note in (*converted.notes, *of_models))


def _problems(text: str, path: Path | None) -> tuple[str, ...]:
    """Return what is to be changed before the settings are valid."""
    try:
        merge(parse_toml(text.encode()), path)
    except SettingsInvalid as error:
        return tuple(f"to be corrected: {line}" for line in error.message.splitlines())
    return ()


def _written(
    converted: Converted, text: str, data: dict[str, Any], config: Path | None
) -> CommandResult:
    if not converted.models:
        raise SettingsInvalid(
            f"the {converted.source} has no model to take over",
            hint="; ".join(_notes(converted)) or None,
        )
    found = find_file(config, config_dir=directories().config, environ=os.environ)
    path = found or directories().config / FILE_NAME
    notes = _notes(converted)
    if found:
        changed = change_file(path, lambda before: _checked(_added(before, converted), path))
        notes += (f"the file before: {changed.backup}",)
    else:
        write_file(path, lambda _: _checked(text, path))
    names = ", ".join(one.name for one in converted.models)
    return CommandResult(data | {"file": str(path)}, f"{path}: models {names}", notes)


def _checked(text: str, path: Path) -> Edit:
    if problems := _problems(text, path):
        raise SettingsInvalid(
            "\n".join(problems),
            hint="nothing was written; without --write the settings are shown, for a file of yours",
        )
    return Edit(text, ())


def _added(before: str, converted: Converted) -> str:
    """Add the models and nodes to settings; other tables of these stay as they are."""
    present = tomllib.loads(before)
    for kind in ("models", "nodes"):
        wanted = converted.document().get(kind, {})
        if both := sorted(wanted.keys() & present.get(kind, {}).keys()):
            raise SettingsInvalid(
                f"the settings have a {kind.removesuffix('s')} {both[0]} already",
                hint="nothing was written; rename one of them",
            )
    addition = tomlkit.parse(render(converted))

    def add(whole: Table) -> None:
        for kind in ("models", "nodes"):
            for name, table in addition.get(kind, {}).items():
                if kind not in whole:
                    whole[kind] = tomlkit.table(is_super_table=True)
                whole[kind][name] = table

    return edited(before, add).rstrip() + "\n"
