"""`corral engine use|rollback|remove`: which installed build is the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus
from supervisor.engines import discover, search
from supervisor.engines.changing import changing, remove_build, roll_back, use_build
from supervisor.engines.in_use import read_in_use
from supervisor.engines.installed import EngineSetting, InstalledBuild, find_build
from supervisor.errors import CorralError, EngineInUse
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult
from supervisor.settings.load import load
from supervisor.settings.schema import Settings


def use(name: str, config: Path | None) -> CommandResult:
    """Use an installed build for models without an engine of their own.

    Raises:
        EngineMissing: It is not installed.
        EngineBroken: It does not run here.
    """
    where = directories()
    settings = load(config, config_dir=where.config).settings
    build = find_build(name, where.engines)
    discover.load(build.name, cache_dir=where.cache, places=search.here(where.engines))
    with changing(where.engines):
        use_build(build.name, where.engines)
    return now_in_use(build.name, settings, where)


def rollback(config: Path | None) -> CommandResult:
    """Use what was in use before.

    Raises:
        EngineMissing: Nothing was.
    """
    where = directories()
    settings = load(config, config_dir=where.config).settings
    with changing(where.engines):
        current = roll_back(where.engines).current
    return now_in_use(current, settings, where)


def remove(name: str, config: Path | None) -> CommandResult:
    """Remove an installed build.

    Raises:
        EngineMissing: It is not installed.
        EngineInUse: It is in use, the settings name it, or the daemon runs it.
    """
    where = directories()
    build = find_build(name, where.engines)
    settings = load(config, config_dir=where.config).settings
    with changing(where.engines):
        for reason, hint in _uses(build, settings, where):
            raise EngineInUse(f"{build.name} is not removed: {reason}", hint=hint)
        remove_build(build, where.engines)
    return CommandResult({"name": build.name}, f"removed {build.name}")


def _uses(
    build: InstalledBuild, settings: Settings, where: Directories
) -> Iterator[tuple[str, str]]:
    """Yield each use of a build, with what ends it."""
    if read_in_use(where.engines).current == build.name:
        yield "it is the build in use", "corral engine use another one, or corral engine rollback"
    for key, setting in _settings(settings):
        if isinstance(setting, str) and _names(setting, build, where):
            yield f"the setting {key} names it", "change the setting, then run corral reload"
    status = _status(where)
    files = where.engines / build.name
    for model in status["models"] if status else ():
        for one in model["instances"]:
            if one["pid"] and one["engine"] and Path(one["engine"]).is_relative_to(files):
                ends = (
                    "it ends with its last answer" if one["retiring"] else "corral reload ends it"
                )
                yield f"{one['name']} runs it", ends


def _names(setting: str, build: InstalledBuild, where: Directories) -> bool:
    try:
        return find_build(setting, where.engines) == build
    except CorralError:
        return False


def _settings(settings: Settings) -> Iterator[tuple[str, EngineSetting | None]]:
    yield "engine", settings.engine
    for name, model in settings.models.items():
        yield f"models.{name}.engine", model.engine
        if model.trial:
            yield f"models.{name}.trial.engine", model.trial.engine


def _status(where: Directories) -> DaemonStatus | None:
    with suppress(CorralError):
        return Client(where.control_socket).status()
    return None


def now_in_use(name: str | None, settings: Settings, where: Directories) -> CommandResult:
    """Show what models without a setting run from now on."""
    text, notes = f"in use: {name or 'no installed build'}", [*_notes(settings, where)]
    path = None
    try:
        places = search.here(where.engines)
        path = str(discover.load(None, cache_dir=where.cache, places=places).path)
    except CorralError as error:
        notes.append(f"it does not run: {error.message}")
    if path and name is None:
        text += f"; {path} is found instead"
    return CommandResult({"name": name, "path": path}, text, tuple(notes))


def _notes(settings: Settings, where: Directories) -> Iterator[str]:
    for key, setting in _settings(settings):
        if setting is not None:
            yield f"the setting {key} = {setting} wins over this"
    if _status(where):
        yield "the running daemon takes it up with corral reload"
