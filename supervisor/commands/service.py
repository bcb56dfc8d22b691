"""`corral service install|uninstall|status|show`: the daemon as a service of systemd."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from supervisor.commands.targets import choose
from supervisor.errors import AccessDenied, DaemonBusy, SettingsInvalid
from supervisor.host.accounts import has_group
from supervisor.host.lock import read_owner
from supervisor.host.paths import Directories, directories, shipped
from supervisor.output import CommandResult, warn
from supervisor.service import install as service_install
from supervisor.service.facts import GPU_GROUPS, NAME, Scope, ServiceFacts
from supervisor.service.files import SYSTEM_PATHS, ServicePaths, service_files
from supervisor.service.launchd import launch_agent
from supervisor.service.reachable import unreachable
from supervisor.service.state import ServiceState, service_state
from supervisor.service.windows import windows_note

Format = Literal["systemd", "launchd", "windows"]

_SYSTEM_CONFIG: Final = Path("/etc") / NAME
_DIRECTORY_VARIABLES: Final = tuple(
    f"CORRAL_{kind}_DIR" for kind in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME")
)
_EXIT_INACTIVE: Final = 3
_NATIVE: Final[Mapping[str, Format]] = MappingProxyType({"darwin": "launchd", "win32": "windows"})


def install(scope: Scope, config: Path | None, *, start: bool) -> CommandResult:
    if scope == "system" and os.geteuid() != 0:
        raise AccessDenied(
            "a service of the system is installed by root",
            hint="sudo corral service install, or corral service install --user",
        )
    facts, paths = _facts(scope, config), _paths(scope)
    if scope == "user":
        _check_no_other_daemon(scope, directories())
    for note in _notes(facts):
        warn(note)
    files = service_files(facts, paths)
    service_install.install(scope, files, paths, start=start)
    lines = [*(f"wrote {path}" for path in files), *_next_steps(facts, start=start)]
    data = {"files": [str(path) for path in files], "started": start}
    return CommandResult(data, "\n".join(lines))


def uninstall(scope: Scope) -> CommandResult:
    removed = service_install.uninstall(scope, _paths(scope))
    kept = "settings, models and conversations are kept"
    lines = [*(f"removed {path}" for path in removed), kept] if removed else ["not installed"]
    return CommandResult({"removed": [str(path) for path in removed]}, "\n".join(lines))


def status(scope: Scope) -> CommandResult:
    state = service_state(scope)
    text = "\n".join(_described(state)) if state.is_installed else "not installed"
    return CommandResult(state.as_json(), text, exit_code=0 if state.is_active else _EXIT_INACTIVE)


def show(scope: Scope, config: Path | None, kind: Format | None) -> CommandResult:
    kind = kind or _NATIVE.get(sys.platform, "systemd")
    if kind == "systemd":
        files = service_files(_facts(scope, config), _paths(scope))
        text = "\n".join(f"# {path}\n{content}" for path, content in files.items())
        data = {str(path): content for path, content in files.items()}
        return CommandResult(data, text.rstrip())
    facts = _facts("user", config)
    log = str(directories().log / "daemon.log")
    text = launch_agent(facts, log) if kind == "launchd" else windows_note(facts)
    return CommandResult({kind: text}, text.rstrip())


def _facts(scope: Scope, config: Path | None) -> ServiceFacts:
    where = directories()
    if scope == "system":
        where = dataclasses.replace(where, config=_SYSTEM_CONFIG)
        config = config or _system_settings()
    loaded = choose((), config, where).loaded
    if loaded.path is None:
        raise SettingsInvalid(
            "a service needs a settings file",
            hint=f"write {where.config / 'corral.toml'}, or name one: --config FILE",
        )
    return ServiceFacts(
        scope,
        _command(),
        loaded.path,
        loaded.settings,
        program_paths=(Path(sys.prefix), Path(sys.base_prefix), shipped("profiles")),
        environment=_environment() if scope == "user" else {},
        groups=tuple(name for name in GPU_GROUPS if has_group(name)),
    )


def _system_settings() -> Path:
    path = _SYSTEM_CONFIG / "corral.toml"
    if not path.exists():
        raise SettingsInvalid(
            f"a service of the system needs {path}, which is not there",
            hint="write it, or name another one: --config FILE; --user is for your own settings",
        )
    return path


def _command() -> tuple[str, ...]:
    program = Path(sys.executable).parent / "corral"
    return (str(program),) if program.is_file() else (sys.executable, "-m", "supervisor.cli")


def _environment() -> dict[str, str]:
    """Return what a user's manager does not have of the user's shell, and the daemon needs."""
    names = ("PATH", *_DIRECTORY_VARIABLES)
    return {name: value for name in names if (value := os.environ.get(name))}


def _paths(scope: Scope) -> ServicePaths:
    if scope == "system":
        return SYSTEM_PATHS
    # Source: systemd.unit(5), "User Unit Search Path".
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return ServicePaths(Path(config) / "systemd" / "user")


def _check_no_other_daemon(scope: Scope, where: Directories) -> None:
    owner = read_owner(where.state_file)
    if owner and owner.is_alive() and owner.pid != service_state(scope).pid:
        raise DaemonBusy(
            f"a daemon already runs (pid {owner.pid}), and not as a service",
            hint="corral stop ends it; then install the service",
        )


def _next_steps(facts: ServiceFacts, *, start: bool) -> Iterator[str]:
    user = " --user" if facts.scope == "user" else ""
    if not start:
        yield f"systemctl{user} start {NAME} starts it"
    yield f"journalctl{user} -u {NAME} -f shows its log"
    if facts.scope == "user":
        yield "loginctl enable-linger lets it run while you are not logged in"
    else:
        yield f"sudo CORRAL_RUNTIME_DIR=/run/{NAME} corral status asks it"


def _notes(facts: ServiceFacts) -> Iterator[str]:
    if facts.scope == "system":
        yield from (f"{NAME} may not start: {one}" for one in unreachable(facts.read_paths))
    known = {*_DIRECTORY_VARIABLES, "CORRAL_CONFIG", "CORRAL_API_KEY"}
    if others := sorted(name for name in os.environ.keys() - known if name.startswith("CORRAL_")):
        yield f"set here, and not for the service: {', '.join(others)}"


def _described(state: ServiceState) -> Iterator[str]:
    enabled = "" if state.is_enabled else ", not enabled"
    yield f"service  {state.state}{enabled}"
    yield f"socket   {state.socket}"
    if state.text:
        yield f"status   {state.text}"
    if state.pid:
        yield f"pid      {state.pid}"
    if state.result not in {"", "success"}:
        yield f"result   {state.result}"
    if state.restarts:
        yield f"restarts {state.restarts}"
