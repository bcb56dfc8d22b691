"""Looks at what the system grants: limits, the address to listen on, directories, leftovers."""

from __future__ import annotations

import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from supervisor.doctor.finding import Finding
from supervisor.host.lock import read_owner
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories

# Three pipes, a pidfd and a log for each engine; two sockets for each stream; and our own.
_FILES_OWN: Final = 64
_FILES_ENGINE: Final = 8
_FILES_STREAM: Final = 2
_OTHER_PLACE: Final = "make it yours and writable, or name another (corral config path lists them)"
# So many clients at once is what an ordinary limit of 1024 has room for.
_STREAMS: Final = 256


def check_files(instances: int) -> Finding:
    """Look at how many files and connections may be open at once."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FILES_OWN + _FILES_ENGINE * instances
    wanted = least + _FILES_STREAM * _STREAMS
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return Finding("open files", "ok", _amount(limit))
    cure = f"raise it: ulimit -n {wanted}" + (
        f" (the hard limit is {hard})" if hard < wanted else ""
    )
    text = f"{limit}, where {instances} engines and {_STREAMS} clients at once need {wanted}"
    return Finding("open files", "fail" if limit < least else "warn", text, cure)


def check_memlock(machine: Machine, wanted_bytes: int) -> Finding:
    """Look at how much memory may be locked, where a model asks for that.

    Args:
        machine: This machine.
        wanted_bytes: Weights of the models that ask for it; 0 when none does.
    """
    allowed = machine.memlock_bytes
    text = "no limit" if allowed is None else f"{allowed >> 20} MiB may be locked"
    if allowed is None or wanted_bytes <= allowed:
        return Finding("locked memory", "ok", text)
    return Finding(
        "locked memory",
        "warn",
        f"{text}, where load-mode mlock wants {wanted_bytes >> 20} MiB: it is left out",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
    )


def check_address(listen: str, ours: str | None) -> Finding:
    """Look at whether clients can be listened for.

    Args:
        listen: HOST:PORT of the settings.
        ours: Where the running daemon listens, or None without one.
    """
    if ours:
        return Finding("address", "ok", f"the daemon listens on {ours}")
    host, _, port = listen.rpartition(":")
    try:
        _try_to_listen(host.strip("[]"), int(port))
    except OSError as error:
        cure = "set proxy.listen to another HOST:PORT, or end who listens there"
        return Finding("address", "fail", f"{listen}: {error.strerror or error}", cure)
    return Finding("address", "ok", f"{listen} is free")


def _try_to_listen(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        # As the proxy does: connections of a daemon that has just ended are no obstacle.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)
        trial.listen()


def check_directories(where: Directories) -> Iterator[Finding]:
    """Yield whether each directory can be used, and by whom else."""
    for name in ("data", "cache", "log", "runtime"):
        yield check_directory(name, getattr(where, name), is_private=name in {"log", "runtime"})


def check_directory(name: str, path: Path, *, is_private: bool) -> Finding:
    """Look at one directory."""
    name = f"directory {name}"
    try:
        found = path.lstat()
    except FileNotFoundError:
        parent = next(one for one in path.parents if one.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return Finding(name, "ok", f"{path} will be made")
        return Finding(name, "fail", f"{path} cannot be made in {parent}", _OTHER_PLACE)
    except OSError as error:
        return Finding(name, "fail", f"{path}: {error.strerror}", _OTHER_PLACE)
    if fault := _fault(path, found, is_private=is_private):
        return Finding(name, "fail", f"{path} {fault}", _OTHER_PLACE)
    if cure := _cure_of_mode(path, is_private=is_private):
        return Finding(name, "warn", f"{path} is open to others", cure)
    return Finding(name, "ok", str(path))


def _cure_of_mode(path: Path, *, is_private: bool) -> str | None:
    """Return what keeps others out of a directory; None where they are kept out."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if is_private and mode & 0o077:
        return f"chmod 700 {path}"
    return f"chmod go-w {path}" if mode & 0o022 else None


def _fault(path: Path, found: os.stat_result, *, is_private: bool) -> str | None:
    """Return what keeps us from using what stands at a path, which may be no directory at all."""
    if is_private and not stat.S_ISDIR(found.st_mode):
        return "is no directory"
    if is_private and found.st_uid != os.geteuid():
        return "belongs to another user"
    if not path.is_dir():
        return "is no directory"
    return None if os.access(path, os.W_OK | os.X_OK) else "cannot be written to"


def check_leftovers(where: Directories, *, is_running: bool) -> Finding:
    """Look for what a daemon that was killed has left behind."""
    if is_running:
        return Finding("leftovers", "ok", "none can be told while the daemon runs")
    owner = read_owner(where.state_file)
    if owner and owner.is_alive():
        return Finding(
            "leftovers",
            "fail",
            f"the daemon of pid {owner.pid} lives, but does not answer",
            f"corral logs tells what it did last; kill {owner.pid} ends it",
        )
    found = [where.state_file, *sorted(where.runtime.glob("*.sock"))]
    left = [path.name for path in found if path.exists()]
    if not left:
        return Finding("leftovers", "ok", "none")
    text = f"{', '.join(left)} of a daemon that was killed"
    return Finding("leftovers", "warn", text, "nothing to do: the next start clears them away")


def _amount(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)
