"""Names the directories and files of the daemon, and the data that ships with the code."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

import platformdirs

from proxy.common.path_length import too_long
from supervisor.errors import AccessDenied
from supervisor.output import warn

_APP = "llama-corral"
# sockaddr_un.sun_path holds 108 bytes on Linux and 104 on the BSDs and macOS, with the final NUL
# (Source: unix(7)); an instance's socket is RUNTIME/NAME.N.sock or NAME.N~M.sock.
_SOCKET_PATH_MAX = 103
# Unescaped in file names, beside letters and digits; every other byte becomes %XX.
_PLAIN: Final = "._:@+-~"
# A file system allows 255 bytes; callers add endings.
_FILE_NAME_MAX_BYTES: Final = 200
_CUT_MARK: Final = "="
_HASH_BYTES: Final = 16


def shipped_directory(name: str) -> Path:
    # `supervisor/shipped/NAME` in a wheel, `NAME` beside `supervisor/` in a checkout.
    package = Path(__file__).resolve().parent.parent
    inside = package / "shipped" / name
    return inside if inside.is_dir() else package.parent / name


def file_name(name: str, max_bytes: int = _FILE_NAME_MAX_BYTES) -> str:
    """Return the file name for the name of a model or an instance, which may be untrusted.

    Different names give different file names, and none leads out of its directory. A name of
    letters, digits and . _ : @ + - ~ that does not begin with a dot is unchanged. A result longer
    than `max_bytes` is cut and ends with a hash.
    """
    encoded = quote(name, safe=_PLAIN, errors="surrogatepass") or "%"
    if encoded.startswith("."):
        encoded = f"%2E{encoded[1:]}"
    if len(encoded) <= max_bytes:
        return encoded
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[: 2 * _HASH_BYTES]
    return f"{encoded[: max_bytes - len(digest) - 1]}{_CUT_MARK}{digest}"


def name_of_file(found: str) -> str:
    """Reverse `file_name`; a file name that was cut is returned unchanged."""
    if _CUT_MARK in found or found == "%":
        return found
    return unquote(found, errors="surrogatepass")


class Directories:
    """The directories of one daemon, and the files in them.

    Args:
        config: Has corral.toml, profiles/ and profiles.d/.
        data: Has models, engines, learned prompts, slots, figures of requests, batches, and layers
            of workers.
        cache: Has engines' help, GGUF metadata, CPU libraries, speeds with and without drafts.
        log: Has the logs of the instances and of the daemon.
        runtime: Has the lock, state file and sockets of one daemon; mode 0700.
    """

    def __init__(self, config: Path, data: Path, cache: Path, log: Path, runtime: Path) -> None:
        self.config, self.data, self.cache = config, data, cache
        self.log, self.runtime = log, runtime
        self.roots = {"config": config, "data": data, "cache": cache}
        self.roots |= {"log": log, "runtime": runtime}
        self.control_socket = runtime / "control.sock"
        self.state_file = runtime / "daemon.json"
        self.desktop_key = runtime / "desktop.key"
        self.lock_file = runtime / "daemon.lock"
        self.profiles = (config / "profiles", shipped_directory("profiles"))
        self.tuned_profiles = config / "profiles.d"
        self.models = data / "models"
        self.engines = data / "engines"
        self.prompts = data / "prompts"
        self.jobs = data / "jobs"
        self.trials = data / "trials"
        self.canaries = data / "canaries"
        self.layer_shares = data / "layers"
        self.draft_speeds = cache / "draft_speeds"
        self.daemon_log = log / "daemon.log"

    def replace(self, **roots: Path) -> Directories:
        return Directories(**{**self.roots, **roots})

    def engine_socket(self, instance: str) -> Path | None:
        """Return the socket path of an instance; None if it would be too long."""
        room_bytes = _SOCKET_PATH_MAX - len(os.fsencode(self.runtime / ".sock"))
        path = self.runtime / f"{file_name(instance, max(room_bytes, 2 * _HASH_BYTES + 2))}.sock"
        return path if _can_be_bound(path) else None

    def engine_log(self, instance: str) -> Path:
        return self.log / f"{file_name(instance)}.log"

    def engine_logs(self) -> dict[str, Path]:
        """Return the log of each instance that ever ran, by the instance's name."""
        found = sorted(path for path in self.log.glob("*.log") if path != self.daemon_log)
        return {name_of_file(path.stem): path for path in found}


def _can_be_bound(path: Path) -> bool:
    return len(os.fsencode(path)) <= _SOCKET_PATH_MAX


_SYSTEMD: Final = {
    "config": "CONFIGURATION_DIRECTORY",
    "data": "STATE_DIRECTORY",
    "cache": "CACHE_DIRECTORY",
    "log": "LOGS_DIRECTORY",
    "runtime": "RUNTIME_DIRECTORY",
}


def directories() -> Directories:
    """Return the directories of this user, the service manager or the environment.

    Each can be set by `CORRAL_CONFIG_DIR`, `CORRAL_DATA_DIR`, `CORRAL_CACHE_DIR`, `CORRAL_LOG_DIR`
    and `CORRAL_RUNTIME_DIR`. Otherwise systemd's `STATE_DIRECTORY`, `CACHE_DIRECTORY`,
    `LOGS_DIRECTORY` and `RUNTIME_DIRECTORY` are used if set (Source: systemd.exec(5)), then the
    platform's own, which follow the XDG variables. Raises AccessDenied: the path of the control
    socket is too long.
    """
    found = Directories(**{kind: _choose(kind, systemd) for kind, systemd in _SYSTEMD.items()})
    if not _can_be_bound(found.control_socket):
        raise AccessDenied(
            f"the path {found.control_socket} is too long for a socket",
            hint="set CORRAL_RUNTIME_DIR to a shorter one",
        )
    return found


def _platform(kind: str) -> str:
    if kind == "runtime" and sys.platform != "darwin":
        return _runtime(os.environ.get("XDG_RUNTIME_DIR", ""))
    found: str = getattr(platformdirs, f"user_{kind}_dir")(_APP, appauthor=False)
    return found


def _runtime(session: str) -> str:
    # platformdirs would fall back to a path in /tmp that another user could create first.
    otherwise = f"{_platform('state')}/run"
    if not session:
        return otherwise
    if problem_text := _session_problem(session):
        warn(f"using {otherwise} instead of XDG_RUNTIME_DIR: {session} {problem_text}")
        return otherwise
    return f"{session}/{_APP}"


def _session_problem(session: str) -> str | None:
    try:
        found = Path(session).stat()
    except (OSError, ValueError) as error:
        return f"cannot be used: {getattr(error, 'strerror', None) or error}"
    if not Path(session).is_absolute():
        return "is not an absolute path"
    return directory_problem(found.st_mode, found.st_uid, os.geteuid(), 0o077)


def directory_problem(mode: int, uid: int, our_uid: int, forbidden: int) -> str | None:
    """Return the end of a sentence that says why a directory is unusable, or None."""
    if not stat.S_ISDIR(mode):
        return "is not a directory"
    if uid != our_uid:
        return f"belongs to another user (uid {uid})"
    if mode & forbidden:
        return f"is open to others (mode {stat.S_IMODE(mode):o})"
    return None


def _choose(kind: str, systemd: str) -> Path:
    ours = f"CORRAL_{kind.upper()}_DIR"
    named = os.environ.get(ours) or os.environ.get(systemd, "").split(":")[0]
    if "\0" in named or too_long(Path(named)):
        raise AccessDenied(f"{ours} cannot be used: longer than a path may be")
    try:
        return Path(named or _platform(kind)).expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:  # no home; a relative path in no directory
        if not named:
            raise AccessDenied(
                f"no directory for {kind}: {error}", hint=f"set HOME or {ours} to an absolute path"
            ) from error
        raise AccessDenied(
            f"{ours} cannot be used: {error}", hint="use an absolute path"
        ) from error


def make_private(directory: Path) -> Path:
    """Create a directory with mode 0700, or restrict an existing one.

    Raises AccessDenied: it cannot be created, is not a directory, or belongs to another user.
    """
    return _make(directory, 0o077, os.O_NOFOLLOW)


def make_ours(directory: Path) -> Path:
    """Create a directory that only its owner can write, or restrict an existing one.

    For directories that users choose and may share or link to, such as the models directory. Raises
    AccessDenied: as `make_private`, or all users share the directory, as they do /tmp.
    """
    return _make(directory, 0o022, 0)


def is_ours(directory: Path) -> bool:
    """Return whether only this user can write in a directory and its parent."""
    try:
        found = [directory.lstat(), directory.parent.stat()]
    except OSError:
        return False
    ours = os.geteuid()
    return not any(directory_problem(entry.st_mode, entry.st_uid, ours, 0o022) for entry in found)


def check_owner(directory: Path) -> None:
    """Raise AccessDenied for another user's directory, unless this user is root."""
    try:
        owner = directory.lstat().st_uid
    except OSError:
        return
    if os.geteuid() not in {owner, 0}:
        raise _not_ours(directory)


def _make(directory: Path, forbidden: int, flags: int) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and directory.is_symlink():
            raise _not_ours(directory) from error
        raise AccessDenied(
            f"cannot use the directory {directory}: {error.strerror}",
            hint="make it writable, or set another one (corral config path lists them)",
        ) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
            raise _not_ours(directory)
        if found.st_mode & forbidden:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~forbidden)
    finally:
        os.close(descriptor)
    return directory


def _not_ours(directory: Path) -> AccessDenied:
    return AccessDenied(
        f"{directory} is not a directory of this user",
        hint="remove it, or set another one (corral config path lists them)",
    )
