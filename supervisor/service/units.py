"""Writes, installs and inspects the files of a systemd service; drafts files for other systems.

The files stand beside this module, with gaps such as `{commands}` on separate lines.

Files with keys are passed to the daemon as credentials of its service: the manager reads them as
root and shows a copy to the service alone, so they may belong to root.

The launch agent for macOS and the logon task for Windows are untested, and say so.

Source: systemd.syntax(7); systemd.service(5), "Command lines"; systemd.unit(5), "Specifiers", `%d`;
systemd.exec(5), `LoadCredential=` and sandboxing; systemd.resource-control(5); sysusers.d(5);
launchd.plist(5); schtasks, "schtasks create".
"""

from __future__ import annotations

import ipaddress
import json
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from proxy.settings import ProxySettings
from supervisor.errors import ServiceFailed, SettingsInvalid, access_denied
from supervisor.models.model_lookup import is_reference
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.settings.tables import STOP_LIMIT_S as HOOKS_STOP_LIMIT_S
from supervisor.system.files import write_atomic

# This line marks our files; files without it are the user's.
MARK: Final = "# Written by `corral service install`, which replaces it; your changes belong into"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@")


def fill(template: str, **lines: Iterable[str]) -> str:
    """Return the text of a file beside this module, with these lines in place of their `{name}`."""
    filled: list[str] = []
    for line in Path(__file__).with_name(template).read_text("ascii").splitlines():
        filled += lines[line[1:-1]] if line.startswith("{") else [line]
    return "\n".join([*filled, ""])


def command_line(words: Iterable[str]) -> str:
    return " ".join(_quote_word(escape_unit(word).replace("$", "$$")) for word in words)


def assignment(name: str, value: str) -> str:
    """Return a value of `Environment=`; the caller has escaped `%`."""
    return _quote_word(f"{name}={value}")


def escape_unit(text: str) -> str:
    """Escape specifiers; raises SettingsInvalid for text that no line can hold."""
    if not text.isprintable():
        raise SettingsInvalid(f"{text!a} cannot stand in a unit file: it has control characters")
    return text.replace("%", "%%")


def _quote_word(text: str) -> str:
    if text and set(text) <= _PLAIN:
        return text
    backslashed = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{backslashed}"'


Scope = Literal["user", "system"]

NAME: Final = "llama-corral"
# The groups that own GPU devices on most distributions.
SERVICE: Final = f"{NAME}.service"
SOCKET: Final = f"{NAME}.socket"
ACCOUNTS: Final = f"{NAME}.conf"
GPU_GROUPS: Final = ("render", "video")
# Added to the daemon's own limits, for a slow disk or a busy machine.
_STOP_MARGIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    scope: Scope
    command: tuple[str, ...]  # the absolute path of a program, and the words before `serve`
    settings_file: Path
    settings: Settings
    program_paths: tuple[Path, ...] = ()  # files that the program reads of its installation
    environment: Mapping[str, str] = field(default_factory=dict)  # variables for the daemon
    groups: tuple[str, ...] = ()  # those of GPU_GROUPS that exist on this machine

    @property
    def serve(self) -> tuple[str, ...]:
        return (*self.command, "serve", "--config", str(self.settings_file))

    @property
    def stop_timeout_s(self) -> int:
        """The longest time that the daemon takes to stop, as in `Daemon._stop`."""
        limits = self.settings.supervisor
        saving_s = limits.slot_save_timeout_s if limits.persist_slots else 0
        own_s = limits.drain_timeout_s + 2 * limits.stop_timeout_s + saving_s
        return round(own_s + HOOKS_STOP_LIMIT_S + _STOP_MARGIN_S)

    @property
    def read_paths(self) -> tuple[Path, ...]:
        """Files and directories that the service must be able to read."""
        settings = self.settings
        models = (path for model in settings.models.values() for path in _model_paths(model))
        engine = [settings.engine] if isinstance(settings.engine, Path) else []
        own = (self.settings_file, *engine)
        return tuple(dict.fromkeys((Path(self.command[0]), *self.program_paths, *own, *models)))


def _model_paths(model: ModelSettings) -> Iterator[Path]:
    if not is_reference(model.path):  # a reference has no file yet
        yield model.path
    if isinstance(model.engine, Path):
        yield model.engine
    if isinstance(model.draft, Path) and not is_reference(model.draft):
        yield model.draft
    yield from model.warm_prompts


# The directories that `ProtectHome=` and `PrivateTmp=` hide. Source: systemd.exec(5).
_HOMES: Final = (Path("/home"), Path("/root"), Path("/run/user"))
_TEMPORARY: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 (nothing is written there)


def _hidden(read_paths: Sequence[Path]) -> Iterator[str]:
    """Hide homes and temporary files, unless the service reads some."""

    def has_path_below(directories: Iterable[Path]) -> bool:
        return any(path.is_relative_to(parent) for path in read_paths for parent in directories)

    yield f"ProtectHome={'read-only' if has_path_below(_HOMES) else 'yes'}"
    yield f"PrivateTmp={'no' if has_path_below(_TEMPORARY) else 'yes'}"


def credential_lines(settings: Settings) -> Iterator[str]:
    """Load each file, and name its copy in the environment, which wins over the settings file."""
    for name, variable, key_file in (
        ("api_keys", "CORRAL_PROXY__API_KEYS_FILE", settings.proxy.api_keys_file),
        ("slots_key", "CORRAL_SUPERVISOR__SLOTS_KEY_FILE", settings.supervisor.slots_key_file),
    ):
        if key_file is not None:
            yield f"LoadCredential={name}:{escape_unit(str(key_file))}"
            yield f"Environment={assignment(variable, f'%d/{name}')}"
    files = {name: node.key_file for name, node in settings.nodes.items() if node.key_file}
    for name, file in files.items():
        yield f"LoadCredential=node_{name}:{escape_unit(str(file))}"
    if files:
        nodes = {name: {"key_file": f"%d/node_{name}"} for name in files}
        yield f"Environment={assignment('CORRAL_NODES', json.dumps(nodes))}"


def socket_unit(settings: ProxySettings) -> str | None:
    """Return the socket unit; None if `listen` is a host name or any port: the daemon listens."""
    try:
        address = ipaddress.ip_address(settings.host)
    except ValueError:
        return None
    if settings.port == 0:
        return None
    host = f"[{address}]" if address.version == 6 else str(address)
    lines = [f"ListenStream={host}:{settings.port}"]
    # Like asyncio's own sockets. Source: Python, loop.create_server.
    lines += ["BindIPv6Only=ipv6-only"] if address.version == 6 else []
    # The interface of the address may come up later.
    lines += [] if address.is_loopback or address.is_unspecified else ["FreeBind=yes"]
    return fill(SOCKET, listen=lines)


def service_unit(facts: ServiceFacts) -> str:
    is_system = facts.scope == "system"
    has_socket = socket_unit(facts.settings.proxy) is not None
    system, mounts = "", []
    if is_system:
        if shared := facts.settings.supervisor.slots_directory:
            mounts = [f"RequiresMountsFor={escape_unit(str(shared))}"]
        groups = [f"SupplementaryGroups={' '.join(facts.groups)}"] if facts.groups else []
        credentials, hidden = credential_lines(facts.settings), [*_hidden(facts.read_paths)]
        if shared:
            hidden.append(f"ReadWritePaths={escape_unit(str(shared))}")
        system = fill("system.conf", groups=groups, credentials=credentials, hidden=hidden)
    return fill(
        SERVICE,
        order=[
            f"After=network.target{f' {SOCKET}' if has_socket else ''}",
            *([f"Requires={SOCKET}"] if has_socket else []),
            *mounts,
        ],
        commands=[
            f"ExecStart={command_line(facts.serve)}",
            f"ExecReload={command_line((*facts.command, 'reload'))}",
        ],
        environment=[
            f"Environment={assignment(name, escape_unit(value))}"
            for name, value in facts.environment.items()
        ],
        settings_invalid=[f"RestartPreventExitStatus={SettingsInvalid.exit_code}"],
        stop_timeout=[f"TimeoutStopSec={facts.stop_timeout_s}"],
        system=system.splitlines(),
        target=[f"WantedBy={'multi-user' if is_system else 'default'}.target"],
    )


# The files that an installation may have, by their paths.
SYSTEM_PATHS: Final = (
    Path("/etc/systemd/system") / SERVICE,
    Path("/etc/systemd/system") / SOCKET,
    Path("/etc/sysusers.d") / ACCOUNTS,
)


def user_paths(directory: Path) -> tuple[Path, ...]:
    return (directory / SERVICE, directory / SOCKET)


def service_files(facts: ServiceFacts, paths: Iterable[Path]) -> dict[Path, str]:
    """Return the text of each of the paths that the service needs."""
    texts = {SERVICE: service_unit(facts), SOCKET: socket_unit(facts.settings.proxy)}
    texts[ACCOUNTS] = fill(ACCOUNTS)
    return {path: text for path in paths if (text := texts[path.name])}


_NOTE: Final = (
    "<!-- UNTESTED: written from Apple's documentation, never run. Save it as\n"
    f"     ~/Library/LaunchAgents/{NAME}.plist, then: launchctl load -w FILE -->\n"
)
_RESTART_S: Final = 15


def launch_agent(facts: ServiceFacts, log: str) -> str:
    import plistlib  # noqa: PLC0415 (an XML parser, which the daemon would keep in memory)

    content = {
        "Label": NAME,
        "ProgramArguments": list(facts.serve),
        "EnvironmentVariables": dict(facts.environment),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": _RESTART_S,
        "ExitTimeOut": facts.stop_timeout_s,
        "StandardErrorPath": log,
        "Umask": 0o077,
    }
    head, end, body = plistlib.dumps(content).decode().partition('.dtd">\n')
    return f"{head}{end}{_NOTE}{body}"


def windows_note(facts: ServiceFacts) -> str:
    command = subprocess.list2cmdline(facts.serve)
    task = subprocess.list2cmdline(
        ["schtasks", "/create", "/tn", NAME, "/sc", "onlogon", "/tr", command]
    )
    return fill("windows.txt", task=[f"    {task}"])


# Starts, stops and restarts have their own limits; this is for a manager that hangs.
_TIMEOUT_S: Final = 3600


def systemctl(scope: Scope, *words: str) -> str:
    """Run systemctl and return its output; raises ServiceFailed."""
    return run("systemctl", *(["--user"] if scope == "user" else []), *words)


def run(*argv: str) -> str:
    """Run a program to its end and return its output; raises ServiceFailed."""
    command = " ".join(word for word in argv if not word.startswith("--"))
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ServiceFailed(
            f"systemd is not installed: there is no program {argv[0]}",
            hint="corral service show prints service definitions for other systems",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ServiceFailed(f"{command} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        reason = done.stderr.strip() or f"exit code {done.returncode}"
        raise ServiceFailed(f"{command} failed: {reason}", hint=_hint(reason, argv))
    return done.stdout


def _hint(reason: str, argv: tuple[str, ...]) -> str:
    if "bus" in reason or "booted with systemd" in reason:
        return "systemd does not run here; corral service show prints the unit"
    user = " --user" if "--user" in argv else ""
    return f"journalctl{user} -u llama-corral -n 20 shows the daemon's log"


_PROPERTIES: Final = (
    "LoadState", "ActiveState", "SubState", "UnitFileState", "StatusText", "MainPID", "Result",
    "NRestarts",
)  # fmt: skip


def service_state(scope: Scope) -> dict[str, Any]:
    """Read the state of the service, for JSON; raises ServiceFailed if systemd does not answer."""
    shown, socket = (_show_properties(scope, unit) for unit in (SERVICE, SOCKET))
    return {
        "is_installed": shown.get("LoadState") not in {None, "", "not-found"},
        "is_active": shown.get("ActiveState") in {"active", "reloading"},
        "state": f"{shown.get('ActiveState', 'unknown')} ({shown.get('SubState', 'unknown')})",
        "is_enabled": shown.get("UnitFileState") == "enabled",
        "text": shown.get("StatusText", ""),
        "pid": int(shown.get("MainPID") or 0) or None,
        "result": shown.get("Result", ""),
        "restarts": int(shown.get("NRestarts") or 0),
        "socket": f"{socket.get('ActiveState', 'unknown')} ({socket.get('SubState', 'unknown')})",
    }


def _show_properties(scope: Scope, unit: str) -> dict[str, str]:
    text = systemctl(scope, "show", unit, f"--property={','.join(_PROPERTIES)}")
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def install(scope: Scope, files: Mapping[Path, str], paths: Sequence[Path], *, start: bool) -> None:
    """Write the files, enable the units and start them; repeating it applies changes.

    Raises AccessDenied, and ServiceFailed if a file is the user's or systemd refuses.
    """
    _check_ours(paths)
    systemctl(scope, "show", "--property=Version")  # write nothing unless systemd answers
    changed = {path.name for path, text in files.items() if _read(path) != text}
    removed = [path for path in paths if path not in files and path.exists()]
    if SOCKET in changed or removed:
        _stop(scope, *(path.name for path in (*files, *removed)))
    _remove(scope, removed)
    for path, text in files.items():
        _write(path, text)
        if path.name == ACCOUNTS:
            run("systemd-sysusers", str(path))
    names = {path.name for path in files}
    units = [name for name in (SOCKET, SERVICE) if name in names]
    systemctl(scope, "daemon-reload")
    systemctl(scope, "enable", *units)
    if start:
        for name in units[:-1]:
            systemctl(scope, "start", name)
        systemctl(scope, "restart" if changed else "start", SERVICE)


def uninstall(scope: Scope, paths: Sequence[Path]) -> tuple[Path, ...]:
    """Stop the service, remove its files and return them.

    Raises AccessDenied, and ServiceFailed if a file is the user's or systemd refuses.
    """
    _check_ours(paths)
    found = tuple(path for path in paths if path.exists())
    if found:
        _stop(scope, *(path.name for path in found))
        _remove(scope, found)
        systemctl(scope, "daemon-reload")
    return found


def _stop(scope: Scope, *names: str) -> None:
    """Stop units, the socket first, so that it does not start the service again."""
    for name in (SOCKET, SERVICE):
        if name in names and _is_known(scope, name):
            systemctl(scope, "stop", name)


def _remove(scope: Scope, found: Iterable[Path]) -> None:
    for path in found:
        if path.name in {SOCKET, SERVICE} and _is_known(scope, path.name):
            systemctl(scope, "disable", path.name)
        with access_denied(f"cannot remove {path}"):
            path.unlink(missing_ok=True)


def _is_known(scope: Scope, name: str) -> bool:
    shown = systemctl(scope, "show", name, "--property=LoadState", "--value")
    return shown.strip() not in {"", "not-found"}


def _check_ours(paths: Iterable[Path]) -> None:
    for path in paths:
        text = _read(path)
        if text is not None and not text.startswith(MARK):
            raise ServiceFailed(
                f"{path} was not written by corral service install",
                hint="move it away, and install again",
            )


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _write(path: Path, text: str) -> None:
    """Write a file that all users can read: it holds no secrets, and systemd warns otherwise."""
    hint = "sudo corral service install, or corral service install --user"
    with access_denied(f"cannot write {path}", hint):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomic(path, text)
        path.chmod(0o644)


def reasons_unreachable(paths: Iterable[Path]) -> Iterator[str]:
    """Yield reasons why a user without special rights, groups or access lists cannot read."""
    yield from dict.fromkeys(reason for path in paths if (reason := _obstacle(path)))


def _obstacle(path: Path) -> str | None:
    for parent in reversed(path.parents):
        if (mode := _mode(parent)) is not None and not mode & stat.S_IXOTH:
            return f"others cannot enter {parent} (mode {stat.S_IMODE(mode):o})"
    mode = _mode(path)
    if mode is None:
        return f"{path} is not there"
    return None if mode & stat.S_IROTH else f"others cannot read {path} (mode {mode & 0o777:o})"


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None
