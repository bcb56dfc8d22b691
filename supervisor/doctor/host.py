"""Checks limits, the address to listen on, access of clients, directories and leftovers."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from proxy.settings import ProxySettings
from supervisor.control.state_text import ADD_KEY
from supervisor.doctor.finding import Finding, failed
from supervisor.errors import SettingsInvalid
from supervisor.host.limits import limit
from supervisor.host.lock import read_owner
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories
from supervisor.proxy_adapter.settings import api_keys, checked, keyless_addresses

# Three pipes, a pidfd and a log for each engine; two sockets for each stream; and our own.
_FILES_OWN: Final = 64
_FILES_PER_ENGINE: Final = 8
_FILES_PER_STREAM: Final = 2
# An ordinary limit of 1024 has room for so many.
_STREAMS: Final = 256
_FIX_DIRECTORY: Final = (
    "make it yours and writable, or name another (corral config path lists them)"
)


def check_files(instances: int) -> Finding:
    """Compare the limit of open files with what engines and clients need."""
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
    return Finding(
        "locked memory",
        "warn",
        f"{text}, but load-mode mlock needs {wanted_bytes >> 20} MiB, so it is left out",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
    )


def check_address(listen: str, daemon_url: str | None) -> Finding:
    """Try to listen on HOST:PORT of the settings, unless our daemon does."""
    if daemon_url:
        return Finding("address", "ok", f"the daemon listens on {daemon_url}")
    host, _, port = listen.rpartition(":")
    try:
        _try_to_listen(host.strip("[]"), int(port))
    except OSError as error:
        fix = "set proxy.listen to another HOST:PORT, or stop the program that listens there"
        return Finding("address", "fail", f"{listen}: {error.strerror or error}", fix)
    return Finding("address", "ok", f"{listen} is free")


def _try_to_listen(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        # As the proxy does: connections of a daemon that has just stopped do not block the port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)
        trial.listen()


def check_clients(settings: ProxySettings) -> Finding:
    """Check the API keys, hosts and origins that may connect."""
    name, path = "clients", settings.api_keys_file
    try:
        checked(settings)
        keys = api_keys(path) if path else None
    except SettingsInvalid as error:
        return failed(name, error)
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
        yield check_directory(name, getattr(where, name), is_private=name in {"log", "runtime"})


def check_directory(name: str, path: Path, *, is_private: bool) -> Finding:
    name = f"directory {name}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        parent = next(one for one in path.parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(name, "ok", f"{path} will be created")
        return Finding(name, "fail", f"{path} cannot be created in {parent}", _FIX_DIRECTORY)
    except OSError as error:
        return Finding(name, "fail", f"{path}: {error.strerror}", _FIX_DIRECTORY)
    if fault := _fault(path, found, is_private=is_private):
        return Finding(name, "fail", f"{path} {fault}", _FIX_DIRECTORY)
    if fix := _fix_mode(path, is_private=is_private):
        return Finding(name, "warn", f"{path} is open to others", fix)
    return Finding(name, "ok", str(path))


def _fix_mode(path: Path, *, is_private: bool) -> str | None:
    """Return the command that closes a directory to others, if it is open."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if is_private and mode & 0o077:
        return f"chmod 700 {path}"
    return f"chmod go-w {path}" if mode & 0o022 else None


def _fault(path: Path, found: os.stat_result, *, is_private: bool) -> str | None:
    """Return why we cannot use a path, which may not be a directory."""
    if not path.is_dir() or (is_private and not stat.S_ISDIR(found.st_mode)):
        return "is not a directory"
    if is_private and found.st_uid != os.geteuid():
        return "belongs to another user"
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"


def check_leftovers(where: Directories, *, is_running: bool) -> Finding:
    """Look for files of a daemon that was killed, and for one that hangs."""
    if is_running:
        return Finding("leftovers", "ok", "not checked while the daemon runs")
    owner = read_owner(where.state_file)
    if owner and owner.is_alive():
        return Finding(
            "leftovers",
            "fail",
            f"the daemon (pid {owner.pid}) runs but does not answer",
            f"corral logs shows what it did last; kill {owner.pid} stops it",
        )
    files = [where.state_file, *sorted(where.runtime.glob("*.sock"))]
    left = [path.name for path in files if path.exists()]
    if not left:
        return Finding("leftovers", "ok", "none")
    text = f"{', '.join(left)} of a daemon that was killed"
    return Finding("leftovers", "warn", text, "nothing to do: the next start removes them")
