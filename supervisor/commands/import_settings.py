"""`corral import`: settings of other programs as corral.toml."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import tomlkit

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from proxy.config.toml_text import parse_toml
from supervisor.commands.key import add_known
from supervisor.conversion.converted import Converted, read_text
from supervisor.conversion.source import SourceKind, convert, kind_of
from supervisor.conversion.text import render
from supervisor.engines.help import Flags
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.files import expanded
from supervisor.host.paths import directories
from supervisor.output import CommandResult
from supervisor.settings.edit import Edit, Table, change_file, edited, write_file
from supervisor.settings.load import FILE_NAME, find_file, load, merge

_STDIN: Final = "-"
_STDIN_MAX: Final = 1024**2


def import_settings(
    words: Sequence[str], kind: SourceKind | None, config: Path | None, *, is_written: bool
) -> CommandResult:
    """Convert a file, standard input or a command line; write it into corral.toml if asked."""
    converted = _without_missing_engines(_converted(words, kind, _engine_flags(config)))
    text = render(converted)
    data = {
        "source": converted.source,
        "models": [model.name for model in converted.models],
        "not taken over": _sentences(converted, "omitted"),
        "notes": _sentences(converted, "notes"),
        "toml": text,
    }
    if is_written:
        return _written(converted, text, data, config)
    problems = _problems(text, None)
    keys = len(converted.keys)
    unshown = [f"its API key{'s' if keys > 1 else ''}: --write adds the SHA-256 to {KEYS_FILE}"]
    return CommandResult(
        data, text.rstrip(), (*_notes(converted), *(unshown if keys else []), *problems)
    )


def _engine_flags(config: Path | None) -> Flags | None:
    """Return the options of the engine of this machine, if it has one that runs."""
    where = directories()
    try:
        settings = load(config, config_dir=where.config).settings
        return LaunchPlanner(settings, where).engine().flags
    except CorralError:
        return None


def _converted(words: Sequence[str], kind: SourceKind | None, known: Flags | None) -> Converted:
    if len(words) == 1 and (words[0] == _STDIN or expanded(Path(words[0])).is_file()):
        path = expanded(Path(words[0]))
        is_stdin = words[0] == _STDIN
        text = sys.stdin.read(_STDIN_MAX) if is_stdin else read_text(path)
        base = Path.cwd() if is_stdin else path.absolute().parent
        return convert(text, kind or kind_of(text), base, os.environ, known)
    if len(words) == 1 and " " not in words[0]:
        raise SettingsInvalid(
            f"there is no file {words[0]}",
            hint="a command line follows two dashes: corral import -- llama-server -m FILE.gguf",
        )
    text = words[0] if len(words) == 1 else shlex.join(words)
    return convert(text, kind or "command", Path.cwd(), os.environ, known)


def _without_missing_engines(converted: Converted) -> Converted:
    """Leave out engines that are not on this machine, such as those of a container."""

    def missing(table: Mapping[str, Any]) -> tuple[str, ...]:
        engine = table.get("engine")
        if engine is None or Path(engine).is_file():
            return ()
        return (f"{engine}: there is no such program here; the engine of corral doctor serves it",)

    def without(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in table.items() if key != "engine" or not missing(table)}

    models = tuple(
        replace(model, table=without(model.table), omitted=(*model.omitted, *missing(model.table)))
        for model in converted.models
    )
    omitted = (*converted.omitted, *missing(converted.tables))
    return replace(converted, models=models, tables=without(converted.tables), omitted=omitted)


def _notes(converted: Converted) -> tuple[str, ...]:
    omitted = (f"not taken over: {one}" for one in _sentences(converted, "omitted"))
    return (*omitted, *(f"note: {one}" for one in _sentences(converted, "notes")))


def _sentences(converted: Converted, kind: Literal["omitted", "notes"]) -> tuple[str, ...]:
    of_models = (
        f"{model.name}: {note}" for model in converted.models for note in getattr(model, kind)
    )
    return (*getattr(converted, kind), *of_models)


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
    if not (converted.models or "models_dir" in converted.tables):
        raise SettingsInvalid(
            f"the {converted.source} has no model to take over",
            hint="; ".join(_notes(converted)) or None,
        )
    found = find_file(config, config_dir=directories().config, environ=os.environ)
    path = found or directories().config / FILE_NAME
    notes = _notes(converted)
    if found:
        changed = change_file(path, lambda before: _checked(_added(before, converted), path))
        kept = tuple(f"not taken over: {key}" for key in _left_out(converted))
        notes += (*kept, f"the file before: {changed.backup}")
    else:
        _checked(text, path)
        if converted.keys:
            keys_file = path.parent / KEYS_FILE
            added = add_known(converted.keys, keys_file)
            notes += (f"{keys_file}: keys {', '.join(added)}",) if added else ()
        write_file(path, lambda _: _checked(text, path))
    names = ", ".join(model.name for model in converted.models) or "those of models_dir"
    return CommandResult(data | {"file": str(path)}, f"{path}: models {names}", notes)


def _left_out(converted: Converted) -> Iterator[str]:
    """Yield what a settings file that was there decides itself."""
    for table, values in converted.tables.items():
        if table != "nodes":
            keys = ", ".join(values) if isinstance(values, Mapping) else str(values)
            yield f"{table} ({keys}): the settings file has its own, or the default"
    if converted.keys:
        yield "the API key: corral key add NAME makes one"


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
