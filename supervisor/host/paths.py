"""Where things are kept: directories by the platform's rules, and the data that ships with us.

Names from outside never become paths here: callers pass only names that the settings have checked.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from proxy.path_length import too_long
from supervisor.errors import AccessDenied
from supervisor.output import warn

_APP = "llama-corral"
# sockaddr_un.sun_path holds 108 bytes on Linux and 104 on the BSDs and macOS, with the final NUL
# (Source: unix(7)); an instance's socket is RUNTIME/NAME.N.sock or NAME.N~M.sock.
_SOCKET_PATH_MAX = 103


def shipped(name: str) -> Path:
    """Return the directory `profiles` or `vendor` that came with this copy of the code.

    A wheel carries them as `supervisor/shipped/NAME`, a checkout as `NAME` beside `supervisor/`.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "shipped" / name
    return inside if inside.is_dir() else package.parent / name


@dataclass(frozen=True, slots=True)
class Directories:
    """Every directory the daemon and its commands use.

    Attributes:
        config: `corral.toml` and the user's own profiles (`config/profiles`).
        data: Models fetched by `corral model get`.
        cache: What can be made again: engines' help, GGUF facts, library overlays.
        log: One log a model instance, and the daemon's own.
        runtime: Lock, state file and sockets of one daemon; 0700.
    """

    config: Path
    data: Path
    cache: Path
    log: Path
    runtime: Path

    @property
    def control_socket(self) -> Path:
        """Return the path of the control socket."""
        return self.runtime / "control.sock"

    @property
    def state_file(self) -> Path:
        """Return the path of the file that names the running daemon."""
        return self.runtime / "daemon.json"

    @property
    def lock_file(self) -> Path:
        """Return the path of the lock that one daemon holds for its life."""
        return self.runtime / "daemon.lock"

    @property
    def profiles(self) -> tuple[Path, ...]:
        """Return where profiles are looked for, first wins."""
        return (self.config / "profiles", shipped("profiles"))

    @property
    def models(self) -> Path:
        """Return the directory of the models that were fetched."""
        return self.data / "models"

    @property
    def prompts(self) -> Path:
        """Return the directory of the prompts that were learned of clients."""
        return self.data / "prompts"

    @property
    def daemon_log(self) -> Path:
        """Return the path of the log of a daemon in the background."""
        return self.log / "daemon.log"

    def engine_socket(self, instance: str) -> Path | None:
        """Return the socket path of an instance, or None when it would be too long to bind."""
        path = self.runtime / f"{instance}.sock"
        return path if _can_be_bound(path) else None


def _can_be_bound(path: Path) -> bool:
    return len(os.fsencode(path)) <= _SOCKET_PATH_MAX


def directories() -> Directories:
    """Return the directories for this user, or those a service manager or the caller chose.

    Each can be set by `CORRAL_CONFIG_DIR`, `CORRAL_DATA_DIR`, `CORRAL_CACHE_DIR`, `CORRAL_LOG_DIR`
    and `CORRAL_RUNTIME_DIR`. Otherwise systemd's `STATE_DIRECTORY`, `CACHE_DIRECTORY`,
    `LOGS_DIRECTORY` and `RUNTIME_DIRECTORY` are used where set (Source: systemd.exec(5)), and then
    the platform's own, which honour the XDG variables.

    Raises:
        AccessDenied: The runtime directory's path is too long for the control socket.
    """
    found = Directories(
        config=_choose("CORRAL_CONFIG_DIR", "CONFIGURATION_DIRECTORY", _platform("config")),
        data=_choose("CORRAL_DATA_DIR", "STATE_DIRECTORY", _platform("data")),
        cache=_choose("CORRAL_CACHE_DIR", "CACHE_DIRECTORY", _platform("cache")),
        log=_choose("CORRAL_LOG_DIR", "LOGS_DIRECTORY", _platform("log")),
        runtime=_choose("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY", _platform("runtime")),
    )
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
    """Return the runtime directory: in the session's own, or else where our state is.

    platformdirs would fall back to a name in /tmp that anybody could take first.
    """
    otherwise = f"{_platform('state')}/run"
    if not session:
        return otherwise
    if trouble := _session_trouble(session):
        warn(f"XDG_RUNTIME_DIR is not used, {otherwise} is: {session} {trouble}")
        return otherwise
    return f"{session}/{_APP}"


def _session_trouble(session: str) -> str | None:
    try:
        found = Path(session).stat()
    except (OSError, ValueError) as error:
        return f"cannot be used: {getattr(error, 'strerror', None) or error}"
    if not Path(session).is_absolute():
        return "is no whole path"
    return trouble(found.st_mode, found.st_uid, os.geteuid(), 0o077)


def trouble(mode: int, uid: int, ours: int, closed: int) -> str | None:
    """Return why a directory is not to be used, as the end of a sentence; None where it is. Pure.

    Args:
        mode: Its type and permissions, as `stat` has them.
        uid: Its owner.
        ours: This user.
        closed: The permissions that nobody must have.
    """
    if not stat.S_ISDIR(mode):
        return "is no directory"
    if uid != ours:
        return f"belongs to another user (uid {uid})"
    if mode & closed:
        return f"is open to others (mode {stat.S_IMODE(mode):o})"
    return None


def _choose(ours: str, systemd: str, otherwise: str) -> Path:
    named = os.environ.get(ours) or os.environ.get(systemd, "").split(":")[0] or otherwise
    if "\0" in named or too_long(Path(named)):
        raise AccessDenied(f"{ours} cannot be used: longer than a path may be")
    try:
        return Path(named).expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:  # ~nobody; a relative path in no directory
        raise AccessDenied(f"{ours} cannot be used: {error}", hint="give a whole path") from error


def make_private(directory: Path) -> Path:
    """Make a directory that only its owner can enter, or make an existing one of ours so.

    Raises:
        AccessDenied: It cannot be made, is no directory, or belongs to somebody else.
    """
    return _make(directory, 0o077, os.O_NOFOLLOW)


def make_ours(directory: Path) -> Path:
    """Make a directory that only its owner can write, or make an existing one of ours so.

    For those that people choose and may share, such as that of models, also by a link: what is
    private stands in private directories below.

    Raises:
        AccessDenied: As `make_private`, or all users share it, as they do /tmp.
    """
    return _make(directory, 0o022, 0)


def is_ours(directory: Path) -> bool:
    """Return whether only this user can have written what stands in a directory and its parent."""
    try:
        found = [directory.lstat(), directory.parent.stat()]
    except OSError:
        return False
    ours = os.geteuid()
    return not any(trouble(one.st_mode, one.st_uid, ours, 0o022) for one in found)


def check_owner(directory: Path) -> None:
    """Refuse a directory of another user, unless root asks; one that is missing is fine.

    Raises:
        AccessDenied: It belongs to another user.
    """
    try:
        owner = directory.lstat().st_uid
    except OSError:
        return
    if os.geteuid() not in {owner, 0}:
        raise _not_ours(directory)


def _make(directory: Path, closed: int, flags: int) -> Path:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR} and directory.is_symlink():
            raise _not_ours(directory) from error
        raise AccessDenied(
            f"cannot use the directory {directory}: {error.strerror}",
            hint="make it yours and writable, or name another (corral config path lists them)",
        ) from error
    try:
        _close(directory, descriptor, closed)
    finally:
        os.close(descriptor)
    return directory


def _close(directory: Path, descriptor: int, closed: int) -> None:
    """Take permissions away from a directory that is ours."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or found.st_mode & stat.S_ISVTX:
        raise _not_ours(directory)
    if found.st_mode & closed:
        os.fchmod(descriptor, stat.S_IMODE(found.st_mode) & ~closed)


def _not_ours(directory: Path) -> AccessDenied:
    return AccessDenied(
        f"{directory} is not a directory of this user",
        hint="remove what stands there, or name another (corral config path lists them)",
    )
