"""`corral engine list|path|help`: llama-server builds and their options."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from supervisor.engines import discover as engines
from supervisor.engines import search
from supervisor.engines.discover import Engine, FoundEngine
from supervisor.engines.help import Flag
from supervisor.engines.installed import EngineSetting
from supervisor.engines.runtime import runtime_metadata
from supervisor.errors import SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, size, table
from supervisor.settings.load import load


def list_engines(config: Path | None) -> CommandResult:
    where = directories()
    setting = _setting(config)
    places = search.here(where.engines)
    found = engines.list_engines(setting, cache_dir=where.cache, places=places)
    if not found:
        engines.load(setting, cache_dir=where.cache, places=places)
    notes = tuple(note for one in found for note in _notes(one))
    head = ("BUILD", "FROM", "NAME", "DEVICES", "PATH")
    return CommandResult([_data(one) for one in found], table(head, [*map(_row, found)]), notes)


def path(config: Path | None) -> CommandResult:
    found = _load(config)
    return CommandResult({"path": str(found.path)}, str(found.path))


def show_help(name: str | None, config: Path | None) -> CommandResult:
    flags = _load(config).flags
    if name is None:
        rows = [(_names(flag), flag.hint or "", _state(flag)) for flag in flags.entries]
        return CommandResult(
            [asdict(flag) for flag in flags.entries], table(("FLAG", "VALUE", ""), rows)
        )
    flag = flags.find(name)
    if flag is None:
        near = flags.nearest(name)
        raise SettingsInvalid(
            f"this engine has no flag {name}",
            hint=f"did you mean {near}?" if near else "corral engine help lists them all",
        )
    return CommandResult(asdict(flag), _describe(flag))


def _setting(config: Path | None) -> EngineSetting | None:
    return load(config, config_dir=directories().config).settings.engine


def _load(config: Path | None) -> Engine:
    where = directories()
    places = search.here(where.engines)
    return engines.load(_setting(config), cache_dir=where.cache, places=places)


def _row(one: FoundEngine) -> tuple[str, ...]:
    source, name = one.candidate.source, one.candidate.name or "-"
    if one.engine is None:
        return ("broken", source, name, "-", str(one.candidate.path))
    command = " ".join(one.engine.command)
    devices = ", ".join(
        f"{device.name} {size(device.total_mib << 20)}" for device in one.engine.devices
    )
    return (str(one.engine.build or "?"), source, name, devices or "CPU only", command)


def _notes(one: FoundEngine) -> list[str]:
    if one.engine is None:
        return [f"{one.candidate.path}: {one.error.message}"] if one.error else []
    return [text for text in (one.engine.note, one.engine.warning) if text]


def _data(one: FoundEngine) -> dict[str, object]:
    found = one.engine
    return {
        "name": one.candidate.name,
        "path": str(found.path if found else one.candidate.path),
        "subcommand": found.subcommand if found else "",
        "source": one.candidate.source,
        **asdict(runtime_metadata(found)),
        "build": found and found.build,
        "devices": [asdict(device) for device in found.devices] if found else [],
        "library_dirs": [str(directory) for directory in found.library_dirs] if found else [],
        "note": found and found.note,
        "warning": found and found.warning,
        "error": one.error and one.error.as_json(),
    }


def _names(flag: Flag) -> str:
    return ", ".join(flag.names)


def _state(flag: Flag) -> str:
    if flag.removed:
        return "removed"
    return "deprecated" if flag.deprecated else ""


def _describe(flag: Flag) -> str:
    facts = {
        "value": flag.hint or "none",
        "choices": ", ".join(flag.choices),
        "default": flag.default,
        "environment": flag.env,
        "removed": flag.removed,
    }
    lines = [f"{label}: {text}" for label, text in facts.items() if text]
    return "\n".join([_names(flag), *lines, "", flag.help])
