"""Implements `corral config` and `corral profile`: checks, shows and changes them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from supervisor.backend.settings_file import check_settings
from supervisor.errors import (
    SettingsInvalid,
    access_denied,
    did_you_mean,
    join_errors,
)
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import CommandResult, table
from supervisor.plan import profile as profiles
from supervisor.plan.plan import check as check_profile
from supervisor.plan.profile import Profile
from supervisor.settings import edit as settings_edit
from supervisor.settings.load import (
    FILE_NAME,
    find_file,
    flatten,
    load,
    merge,
    restart_changes,
    search_path,
)
from supervisor.settings.reference import DIRECTIVE, json_schema
from supervisor.settings.reference import FILE_NAME as SCHEMA_NAME
from supervisor.settings.schema import Settings
from supervisor.system.files import write_atomic
from supervisor.system.paths import directories, make_private
from supervisor.system.toml_file import read_toml


def check(config: Path | None) -> CommandResult:
    loaded = load(config)
    planner = LaunchPlanner(loaded.settings, directories())
    found = check_settings(loaded.settings, planner)
    if found.errors:
        raise join_errors(found.errors)
    source = str(loaded.path or "no settings file")
    names = ", ".join(planner.entries) or "none"
    data = {"path": source, "models": list(planner.entries), "omitted": found.omitted}
    text = f"{source} is fine; models: {names}"
    return CommandResult(data, text, (*found.omitted, *found.certificates))


def show_settings(config: Path | None) -> CommandResult:
    loaded = load(config)
    values = flatten(loaded.settings.model_dump(mode="json"))
    rows = [(key, str(value), loaded.origins.get(key, "default")) for key, value in values.items()]
    data = {key: {"value": values[key], "origin": origin} for key, _, origin in rows}
    return CommandResult(data, table(("SETTING", "VALUE", "FROM"), rows))


def get_value(key: str, config: Path | None) -> CommandResult:
    """Print a text unchanged, and other values as TOML; raises SettingsInvalid."""
    value: Any = load(config).settings.model_dump(mode="json")
    for depth, part in enumerate(parts := settings_edit.key_parts(key)):
        if not isinstance(value, Mapping) or part not in value:
            names = value if isinstance(value, Mapping) else ()
            before = f" in {'.'.join(parts[:depth])}" if depth else ""
            raise SettingsInvalid(
                f"no setting{before} is named {part}{did_you_mean(part, names)}",
                hint="corral config show lists every setting",
            )
        value = value[part]
    if isinstance(value, Mapping):
        rows = [f"{name} = {_toml(item)}" for name, item in flatten(value).items()]
        return CommandResult(value, "\n".join(rows))
    return CommandResult(value, value if isinstance(value, str) else _toml(value))


def _toml(value: object) -> str:
    return "unset" if value is None else settings_edit.toml(value)


def paths(config: Path | None) -> CommandResult:
    where = directories()
    loaded = load(config)
    data = {
        "settings": str(loaded.path) if loaded.path else None,
        "looked at": [str(place) for place in search_path(where.config)],
        **{
            kind: str(getattr(where, kind))
            for kind in ("config", "data", "cache", "log", "runtime")
        },
    }
    rows = [
        (key, ", ".join(value) if isinstance(value, list) else str(value or "none"))
        for key, value in data.items()
    ]
    return CommandResult(data, "\n".join(f"{key:10} {value}" for key, value in rows))


def set_value(key: str, value: str, config: Path | None) -> CommandResult:
    """Set one value; creates the file if there is none."""
    parts = settings_edit.key_parts(key)
    path = _file(config) or directories().config / FILE_NAME

    def edit(text: str) -> settings_edit.Edit:
        meanings = settings_edit.values_of(value)
        return settings_edit.first_valid(
            (settings_edit.with_value(text, parts, m) for m in meanings), path
        )

    return _write(path, edit, parts)


def unset_value(key: str, config: Path | None) -> CommandResult:
    parts = settings_edit.key_parts(key)
    path = _file(config)
    if path is None:
        raise SettingsInvalid("there is no settings file", hint="corral config path shows where")

    def edit(text: str) -> settings_edit.Edit:
        return settings_edit.first_valid([settings_edit.without_value(text, parts)], path)

    return _write(path, edit, parts)


def _file(config: Path | None) -> Path | None:
    return find_file(config, config_dir=directories().config, environ=os.environ)


def _write(
    path: Path, edit: Callable[[str], settings_edit.Edit], parts: tuple[str, ...]
) -> CommandResult:
    before = None
    with suppress(SettingsInvalid):  # no file yet, or an invalid one
        before = merge(read_toml(path), path).settings
    lines = settings_edit.write_file(path, edit)
    data = {"file": str(path), "lines": lines}
    text = "\n".join(f"{path}: {line}" for line in lines)
    return CommandResult(data, text, tuple(_notes(path, before, ".".join(parts))))


def _notes(path: Path, before: Settings | None, key: str) -> Iterator[str]:
    loaded = merge(read_toml(path), path)
    if loaded.origins.get(key) == "environment":
        yield f"the environment sets {key} too, and takes precedence"
    if not directories().control_socket.exists():
        return
    if any(restart_changes(before or Settings(), loaded.settings)):
        yield "a daemon runs: it needs a restart (corral stop, then corral start) to apply it"
    else:
        yield "a daemon runs: corral reload applies it"


def schema(config: Path | None, *, write: bool) -> CommandResult:
    """Show the schema, or write it beside the settings file, and name it in its first line."""
    text = json.dumps(json_schema(), indent=2)
    if not write:
        return CommandResult(json_schema(), text)
    path = _file(config) or directories().config / FILE_NAME
    beside = path.with_name(SCHEMA_NAME)
    with access_denied(f"cannot write {beside}"):
        if not path.parent.exists():
            make_private(path.parent)
        write_atomic(beside, f"{text}\n")

    def add_directive(text: str) -> settings_edit.Edit:
        has_directive = text.startswith("#:schema ")
        return text if has_directive else f"{DIRECTIVE}\n{text}", ()

    settings_edit.write_file(path, add_directive)
    return CommandResult({"file": str(path), "schema": str(beside)}, f"{beside}\n{path}")


def list_profiles() -> CommandResult:
    dirs = directories().profiles
    found = [profiles.load(name, dirs) for name in profiles.names(dirs)]
    rows = [(profile.name, profile.extends or "-", profile.description) for profile in found]
    return CommandResult(
        [_data(profile) for profile in found], table(("PROFILE", "EXTENDS", "WHAT FOR"), rows)
    )


def show_profile(name: str) -> CommandResult:
    found = profiles.load(name, directories().profiles)
    rows = [(flag, str(value), found.origins[flag]) for flag, value in found.flags.items()]
    text = f"{found.description}\n{found.path}\n\n{table(('FLAG', 'VALUE', 'FROM'), rows)}"
    return CommandResult(_data(found), text)


def check_profiles(name: str | None, config: Path | None) -> CommandResult:
    where = directories()
    flags = LaunchPlanner(load(config).settings, where).engine().flags
    names = [name] if name else profiles.names(where.profiles)
    omitted = {
        name: [
            f"{key}: {reason}"
            for key, _, reason in check_profile(profiles.load(name, where.profiles), flags)[1]
        ]
        for name in names
    }
    text = "\n".join(f"{name}: fine" for name in names)
    notes = tuple(f"{name}: omits {line}" for name, lines in omitted.items() for line in lines)
    return CommandResult({"profiles": omitted}, text, notes)


def _data(found: Profile) -> dict[str, object]:
    return {
        "name": found.name,
        "path": str(found.path),
        "description": found.description,
        "extends": found.extends,
        "flags": dict(found.flags),
        "origins": dict(found.origins),
    }
