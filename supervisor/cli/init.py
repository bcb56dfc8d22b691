"""Implements `corral init` and `corral import`: a corral.toml for this machine, or converted."""

from __future__ import annotations

import os
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import tomlkit

from proxy.auth.keys_file import FILE_NAME as KEYS_FILE
from proxy.common.toml_text import parse_toml
from supervisor.builds.discover import Engine
from supervisor.builds.help import Flags
from supervisor.cli.config import schema
from supervisor.cli.key import add_known
from supervisor.cli.targets import choose
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import CommandResult, size
from supervisor.plan.fit import misfit_reason
from supervisor.plan.plan import Plan
from supervisor.settings import edit as settings_edit
from supervisor.settings.import_flags import Converted, read_text
from supervisor.settings.import_source import SourceKind, convert, kind_of, render
from supervisor.settings.load import FILE_NAME, find_file, load, merge
from supervisor.settings.schema import Settings
from supervisor.settings.stored_models import StoredModels, table_of
from supervisor.system import machine
from supervisor.system.files import expand_home
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories, directories

_MODELS_MAX: Final = 20


def init(models: Sequence[str], config: Path | None, *, force: bool) -> CommandResult:
    """Write the settings file with the named models, or with all models stored here."""
    where = directories()
    path = (config or where.config / FILE_NAME).absolute()
    if path.exists() and not force:
        raise SettingsInvalid(
            f"there is a settings file already: {path}",
            hint="corral config set KEY VALUE changes it; --force replaces it, and keeps a backup",
        )
    tables, left_out = _choose_models(models, where)
    planner = LaunchPlanner(merge({"models": tables}, None).settings, where)
    initial = [_model(name, table, planner) for name, table in tables.items()]
    engine = None
    with suppress(CorralError):
        engine = planner.engine()
    edit: settings_edit.Edit = (
        settings_edit.initial_text(_machine_line(machine.read(), engine), initial),
        (),
    )
    notes = []
    if path.exists():
        notes.append(f"the file before: {settings_edit.change_file(path, lambda _: edit).backup}")
    else:
        settings_edit.write_file(path, lambda _: edit)
    schema(path, write=True)
    if left_out:
        notes.append(f"{left_out} more models are stored here: corral model list")
    next_step = "it has no model yet: corral model get smollm2 downloads one"
    if any(model.is_usable for model in initial):
        next_step = "corral start serves its models"
    data = {"file": str(path), "models": list(tables)}
    return CommandResult(data, f"wrote {path}\n{next_step}", tuple(notes))


def _choose_models(
    words: Sequence[str], where: Directories
) -> tuple[dict[str, dict[str, Any]], int]:
    """Return tables of models by name, and the number of models left out."""
    if words:
        targets, members = choose(words, None, where), {"path", "flags", "aliases"}
        known = targets.loaded.settings.models
        chosen = {name: known[name] for name in targets.names}
        return {
            name: model.model_dump(mode="json", include=members) for name, model in chosen.items()
        }, 0
    found = StoredModels(Settings(), where).catalogue.models
    served = [candidate for candidate in found if candidate.problem is None]
    tables = {candidate.id: dict(table_of(candidate)) for candidate in served[:_MODELS_MAX]}
    return tables, len(served) - len(tables)


def _model(name: str, table: dict[str, Any], planner: LaunchPlanner) -> settings_edit.InitialModel:
    kept = {key: value for key, value in table.items() if value}
    try:
        made = planner.plan(name)
        reason = misfit_reason(made.estimate, planner.capacity(made.engine))
    except CorralError as error:
        return settings_edit.InitialModel(name, kept, "", error.message)
    return settings_edit.InitialModel(
        name, kept, _facts(made), reason, generates=made.embedding is None
    )


def _facts(made: Plan) -> str:
    taken = made.estimate
    devices = taken.devices.items()
    on_devices = "".join(f", {size(memory.at_start)} of {name}" for name, memory in devices)
    context = f"{made.slots} slots with {made.ctx_size // max(made.slots, 1)} tokens each"
    return (
        f"{made.gguf.architecture}, {made.gguf.quantisation}, {size(made.gguf.size_bytes)}: "
        f"takes {size(taken.host.total)} of main memory{on_devices}; {context}"
    )


def _machine_line(here: Machine, engine: Engine | None) -> str:
    devices = ", ".join(device.description for device in engine.devices) if engine else ""
    found = f"engine build {engine.build}" if engine else "no llama-server (corral doctor)"
    return (
        f"{here.physical_cores} cores, {size(here.memory_bytes)} of memory, "
        f"{devices or 'no GPU'}; {found}"
    )


_STDIN: Final = "-"
_STDIN_MAX: Final = 1024**2


def import_settings(
    source: Sequence[str], kind: SourceKind | None, config: Path | None, *, write: bool
) -> CommandResult:
    """Convert a file, standard input or a command line; write it into corral.toml if asked."""
    converted = _without_missing_engines(_convert(source, kind, _engine_flags(config)))
    text = render(converted)
    data = {
        "source": converted.source,
        "models": [model.name for model in converted.models],
        "not taken over": _sentences(converted, "omitted"),
        "notes": _sentences(converted, "notes"),
        "toml": text,
    }
    if write:
        return _write_settings(converted, text, data, config)
    notes, keys = list(_notes(converted)), len(converted.keys)
    if keys:
        notes.append(
            f"its API key{'s' if keys > 1 else ''}: --write adds the SHA-256 to {KEYS_FILE}"
        )
    return CommandResult(data, text.rstrip(), (*notes, *_problems(text, None)))


def _engine_flags(config: Path | None) -> Flags | None:
    where = directories()
    try:
        return LaunchPlanner(load(config).settings, where).engine().flags
    except CorralError:
        return None


def _convert(words: Sequence[str], kind: SourceKind | None, known: Flags | None) -> Converted:
    if len(words) == 1 and (words[0] == _STDIN or expand_home(Path(words[0])).is_file()):
        path = expand_home(Path(words[0]))
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
        return (f"{engine}: there is no such program here; this machine's own engine is used",)

    def without(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in table.items() if key != "engine" or not missing(table)}

    models = tuple(
        replace(model, table=without(model.table), omitted=(*model.omitted, *missing(model.table)))
        for model in converted.models
    )
    omitted = (*converted.omitted, *missing(converted.tables))
    return replace(converted, models=models, tables=without(converted.tables), omitted=omitted)


def _notes(converted: Converted) -> tuple[str, ...]:
    omitted = (f"not taken over: {sentence}" for sentence in _sentences(converted, "omitted"))
    return (*omitted, *(f"note: {sentence}" for sentence in _sentences(converted, "notes")))


def _sentences(converted: Converted, kind: Literal["omitted", "notes"]) -> tuple[str, ...]:
    of_models = (
        f"{model.name}: {note}" for model in converted.models for note in getattr(model, kind)
    )
    return (*getattr(converted, kind), *of_models)


def _problems(text: str, path: Path | None) -> tuple[str, ...]:
    try:
        merge(parse_toml(text.encode()), path)
    except SettingsInvalid as error:
        return tuple(f"to be corrected: {line}" for line in error.message.splitlines())
    return ()


def _write_settings(
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
        changed = settings_edit.change_file(
            path, lambda before: _check_edit(_add_models(before, converted), path)
        )
        kept = tuple(f"not taken over: {key}" for key in _left_out_keys(converted))
        notes += (*kept, f"the file before: {changed.backup}")
    else:
        _check_edit(text, path)
        if converted.keys:
            keys_file = path.parent / KEYS_FILE
            added = add_known(converted.keys, keys_file)
            notes += (f"{keys_file}: keys {', '.join(added)}",) if added else ()
        settings_edit.write_file(path, lambda _: _check_edit(text, path))
    names = ", ".join(model.name for model in converted.models) or "those of models_dir"
    return CommandResult(data | {"file": str(path)}, f"{path}: models {names}", notes)


def _left_out_keys(converted: Converted) -> Iterator[str]:
    """Yield the settings that an existing settings file keeps as they are."""
    for table, values in converted.tables.items():
        if table != "nodes":
            keys = ", ".join(values) if isinstance(values, Mapping) else str(values)
            yield f"{table} ({keys}): the settings file has its own, or the default"
    if converted.keys:
        yield "the API key: corral key add NAME makes one"


def _check_edit(text: str, path: Path) -> settings_edit.Edit:
    if problems := _problems(text, path):
        raise SettingsInvalid(
            "\n".join(problems),
            hint="nothing was written; without --write the settings are shown, to edit them",
        )
    return text, ()


def _add_models(before: str, converted: Converted) -> str:
    """Add models and nodes to the text of a settings file; its other tables stay unchanged."""
    present = tomllib.loads(before)
    for kind in ("models", "nodes"):
        wanted = converted.document().get(kind, {})
        if both := sorted(wanted.keys() & present.get(kind, {}).keys()):
            raise SettingsInvalid(
                f"the settings have a {kind.removesuffix('s')} {both[0]} already",
                hint="nothing was written; rename one of them",
            )
    addition = tomlkit.parse(render(converted))

    def add(whole: settings_edit.Table) -> None:
        for kind in ("models", "nodes"):
            for name, table in addition.get(kind, {}).items():
                if kind not in whole:
                    whole[kind] = tomlkit.table(is_super_table=True)
                whole[kind][name] = table

    return settings_edit.edit_text(before, add).rstrip() + "\n"
