"""Checks of the host: engine, hooks, traces, processor, limits, address, directories."""

from __future__ import annotations

import itertools
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from threading import Thread
from typing import Final, Literal, get_args
from urllib.parse import urlsplit

from proxy.errors import ConfigError
from proxy.observe.tracing import check_tracing, endpoint_of
from proxy.settings import ProxySettings, TracingSettings
from supervisor.backend.proxy_settings import api_keys, check_proxy_settings, keyless_addresses
from supervisor.builds.discover import Engine
from supervisor.daemon.control_messages import ADD_KEY
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.service.hook_commands import example, hook_command, hook_directory, missing_program
from supervisor.settings.load import Loaded, flatten
from supervisor.settings.schema import Settings
from supervisor.settings.tables import HookName
from supervisor.system.daemon_lock import read_owner
from supervisor.system.limits import limit
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories
from supervisor.system.processor_load import ProcessorReading, processor_load, read_this_processor

_HIDDEN: Final = "[hidden]"
# Options of llama-server that take a secret: --api-key, --hf-token, and similar later ones.
_SECRET: Final = re.compile(r"(?:^|[.-])(?:key|token|password|secret)$")


@dataclass(frozen=True, slots=True)
class Finding:
    name: str  # name of the check, such as `engine` or `model chat`
    # `fail`: something will not work. `warn`: it works, but worse than it could.
    level: Literal["ok", "warn", "fail"]
    text: str  # the result, without a full stop
    fix: str | None = None  # how to fix or improve it, if there is anything to do


def failure_finding(name: str, error: CorralError) -> Finding:
    return Finding(name, "fail", error.message, error.hint)


def redact(finding: Finding, home: Path, secrets: Iterable[str]) -> Finding:
    """Replace the home directory by `~` and hide secrets."""

    def clean(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, _HIDDEN)
        return text.replace(str(home), "~") if home != Path(home.anchor) else text

    fix = finding.fix and clean(finding.fix)
    return replace(finding, name=clean(finding.name), text=clean(finding.text), fix=fix)


def secrets_of(settings: Settings) -> tuple[str, ...]:
    """Return the secret values in the settings, longest first."""
    found = {
        str(value)
        for model in settings.models.values()
        for key, value in [*flatten(model.flags).items(), *_pairs(model.args)]
        if _SECRET.search(key) and str(value)
    }
    return tuple(sorted(found, key=len, reverse=True))


def _pairs(args: tuple[str, ...]) -> Iterable[tuple[str, str]]:
    """Yield options with their values, for both spellings: `--a b` and `--a=b`."""
    for word in args:
        name, _, value = word.partition("=")
        yield name, value
    yield from itertools.pairwise(args)


def check_engine(engine: Engine) -> Iterator[Finding]:
    build = f"build {engine.build}" if engine.build else "build unknown"
    text = f"{build} ({engine.version}), from {engine.source}: {' '.join(engine.command)}"
    yield Finding("engine", "ok", text)
    if engine.warning:
        fault, _, fix = engine.warning.rpartition("; ")
        yield Finding("cpu", "fail", fault or fix, fix if fault else None)
    else:
        note = engine.note or "has every instruction set that the engine needs"
        yield Finding("cpu", "ok", note)
    yield Finding("devices", "ok", _devices(engine))


def _devices(engine: Engine) -> str:
    found = [
        (f"{device.name}: {device.description}", device.total_mib) for device in engine.devices
    ]
    shown = (f"{text}, {mib} MiB" if mib else text for text, mib in found)
    return "; ".join(shown) or "none; layers run on the CPU"


def check_hooks(loaded: Loaded) -> Iterator[Finding]:
    directory = hook_directory(loaded.path)
    for hook in get_args(HookName):
        event = example(hook, datetime.now(tz=UTC), "chat", "node")
        commands = loaded.settings.hooks.commands(hook)
        found = (missing_program(hook_command(words, event, directory)) for words in commands)
        if problem := next(filter(None, found), None):
            fix = f"set hooks.{hook} to a program that exists"
            yield Finding(f"hook {hook}", "fail", problem, fix)
        elif commands:
            programs = ", ".join(words[0] for words in commands)
            fix = f"`corral hooks test {hook}` tries it"
            yield Finding(f"hook {hook}", "ok", f"runs {programs}; {fix}")


_CONNECT_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}


def check_traces(settings: TracingSettings) -> Iterator[Finding]:
    endpoint = endpoint_of(settings)
    if endpoint is None:
        return
    try:
        check_tracing(settings)
    except ConfigError as error:
        yield Finding("traces", "fail", error.message, error.hint)
        return
    yield _check_connection(endpoint)


def _check_connection(endpoint: str) -> Finding:
    parts = urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0))
    shown = f"{parts.scheme}://{parts.hostname}:{address[1]}"
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        text = f"the collector {shown} takes no connection: {error.strerror or error}"
        return Finding("traces", "warn", text, "start it, or correct proxy.tracing.endpoint")
    return Finding("traces", "ok", f"sent to {shown}")


_NAME: Final = "processor load"
_SPAN_S: Final = 0.3
# The share of a core that a busy program gets if it competes with one of our threads.
_BUSY_CORES: Final = 0.5


def check_processor(
    own_pids: Iterable[int], read: Callable[[Iterable[int]], ProcessorReading] = read_this_processor
) -> Finding:
    """Measure the load of other programs for 0.3 s; `own_pids`: the daemon and its engines."""
    pids = tuple(own_pids)
    before = read(pids)
    time.sleep(_SPAN_S)
    found = processor_load(before, read(pids))
    if found.others_cores is None and found.pressure is None:
        text = "/proc/stat and /proc/pressure/cpu cannot be read, so threads do not follow the load"
        return Finding(_NAME, "warn", text, "set threads of the models for this machine")
    if found.others_cores is None:
        return Finding(_NAME, "ok", f"tasks waited {found.pressure:.0%} of the time")
    text = f"other programs take {found.others_cores:.1f} cores"
    if found.others_cores < _BUSY_CORES:
        return Finding(_NAME, "ok", text)
    return Finding(_NAME, "warn", text, "end them, or lower their priority (renice 10 -p PID)")


# Each engine takes three pipes, a pidfd and a log; each stream takes two sockets.
_FILES_OWN: Final = 64
_FILES_PER_ENGINE: Final = 8
_FILES_PER_STREAM: Final = 2
# The usual limit of 1024 files is enough for this many streams.
_STREAMS: Final = 256
_FIX_DIRECTORY: Final = (
    "make it yours and writable, or name another (corral config path lists them)"
)


def check_files(instances: int) -> Finding:
    soft, hard = limit("RLIMIT_NOFILE")
    least = _FILES_OWN + _FILES_PER_ENGINE * instances
    wanted = least + _FILES_PER_STREAM * _STREAMS
    if soft is None:
        return Finding("open files", "ok", "no limit")
    if soft >= wanted:
        return Finding("open files", "ok", str(soft))
    fix = f"raise it: ulimit -n {wanted}"
    fix += f" (the hard limit is {hard})" if hard is not None and hard < wanted else ""
    text = f"the limit is {soft}; {instances} engines and {_STREAMS} clients need {wanted}"
    return Finding("open files", "fail" if soft < least else "warn", text, fix)


def check_memlock(machine: Machine, wanted_bytes: int) -> Finding:
    """Compare the limit of locked memory with the largest model that wants to be locked."""
    allowed = machine.memlock_bytes
    text = "no limit" if allowed is None else f"{allowed >> 20} MiB may be locked"
    if allowed is None or wanted_bytes <= allowed:
        return Finding("locked memory", "ok", text)
    text += f", but load-mode mlock needs {wanted_bytes >> 20} MiB, so it is left out"
    fix = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit"
    return Finding("locked memory", "warn", text, fix)


def check_address(listen: str, daemon_url: str | None) -> Finding:
    """Try to listen on HOST:PORT of the settings, unless our daemon does."""
    if daemon_url:
        return Finding("address", "ok", f"the daemon listens on {daemon_url}")
    host, _, port = listen.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as trial:
            # As the proxy does: connections of a daemon that just stopped do not block the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except OSError as error:
        fix = "set proxy.listen to another HOST:PORT, or stop the program that listens there"
        return Finding("address", "fail", f"{listen}: {error.strerror or error}", fix)
    return Finding("address", "ok", f"{listen} is free")


def check_clients(settings: ProxySettings) -> Finding:
    name, path = "clients", settings.api_keys_file
    try:
        check_proxy_settings(settings)
        keys = api_keys(path) if path else None
    except SettingsInvalid as error:
        return failure_finding(name, error)
    if addresses := keyless_addresses(settings):
        text = f"other machines can reach {' and '.join(addresses)}, and no key is required"
        return Finding(name, "warn", text, ADD_KEY)
    if keys is None:
        return Finding(name, "ok", "programs of this machine, without a key")
    if not keys:
        return Finding(name, "warn", f"{path} has no key: all requests are rejected", ADD_KEY)
    return Finding(name, "ok", f"{len(keys)} API {'key' if len(keys) == 1 else 'keys'} in {path}")


def check_directories(where: Directories) -> Iterator[Finding]:
    for name in ("data", "cache", "log", "runtime"):
        is_private = name in {"log", "runtime"}
        yield check_directory(f"directory {name}", getattr(where, name), is_private=is_private)


def check_directory(name: str, path: Path, *, is_private: bool) -> Finding:
    try:
        found = path.lstat()
    except FileNotFoundError:
        parent = next(parent for parent in path.parents if parent.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(name, "ok", f"{path} will be created")
        return Finding(name, "fail", f"{path} cannot be created in {parent}", _FIX_DIRECTORY)
    except OSError as error:
        return Finding(name, "fail", f"{path}: {error.strerror}", _FIX_DIRECTORY)
    if fault := _fault(path, found, is_private=is_private):
        return Finding(name, "fail", f"{path} {fault}", _FIX_DIRECTORY)
    if stat.S_IMODE(path.stat().st_mode) & (0o077 if is_private else 0o022):
        fix = f"chmod {'700' if is_private else 'go-w'} {path}"
        return Finding(name, "warn", f"{path} is open to others", fix)
    return Finding(name, "ok", str(path))


_ANSWER_S: Final = 5.0
_SHARED: Final = "slots_directory"
_FIX_SHARED: Final = "conversations are neither saved nor restored until then; requests are served"
_FIX_MISSING: Final = (
    "mount the file system that the machines share; without it, the start creates the directory on "
    "this machine alone"
)


def check_slots_directory(path: Path, limit_s: float = _ANSWER_S) -> Finding:
    """Write and read, in a thread: a network file system may not answer for minutes."""
    answers = SimpleQueue[Finding]()
    Thread(target=lambda: answers.put(_try_to_use(path)), daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except Empty:
        text = f"{path} has not answered for {limit_s:.0f} s"
        return Finding(_SHARED, "fail", text, _FIX_SHARED)


def _try_to_use(path: Path) -> Finding:
    finding = check_directory(_SHARED, path, is_private=False)
    if not path.parent.exists():
        text = f"{path} and its parent directory do not exist"
        return Finding(_SHARED, "warn", text, _FIX_MISSING)
    if finding.level == "fail" or not path.exists():
        return finding
    verb = "write"
    try:
        with TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        verb = "read"
        for file_path in _slot_files(path):
            with file_path.open("rb") as file:
                file.read(4096)
            break
    except OSError as error:
        text = f"cannot {verb} in {path}: {error.strerror}"
        return Finding(_SHARED, "fail", text, _FIX_SHARED)
    return finding


def _slot_files(path: Path) -> Iterator[Path]:
    """Yield the files of all models in a directory of slot files; raises OSError."""
    if (kept := path / "kept").exists():
        for directory in kept.iterdir():
            yield from directory.iterdir()


def _fault(path: Path, found: os.stat_result, *, is_private: bool) -> str | None:
    """Return why we cannot use a path, which may not be a directory."""
    if not path.is_dir() or (is_private and not stat.S_ISDIR(found.st_mode)):
        return "is not a directory"
    if is_private and found.st_uid != os.geteuid():
        return "belongs to another user"
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"


def check_leftovers(where: Directories, *, is_running: bool) -> Finding:
    """Look for files of a killed daemon, and for a daemon that hangs."""
    if is_running:
        return Finding("leftovers", "ok", "not checked while the daemon runs")
    owner = read_owner(where.state_file)
    if owner and owner.is_alive():
        fix = f"corral logs shows its last lines; kill {owner.pid} stops it"
        text = f"the daemon (pid {owner.pid}) runs but does not answer"
        return Finding("leftovers", "fail", text, fix)
    files = [where.state_file, *sorted(where.runtime.glob("*.sock"))]
    left = [path.name for path in files if path.exists()]
    if not left:
        return Finding("leftovers", "ok", "none")
    text = f"{', '.join(left)} of a daemon that was killed"
    return Finding("leftovers", "warn", text, "nothing to do: the next start removes them")
