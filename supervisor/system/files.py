"""Reads files that users name, writes files atomically, and caches small JSON values.

The cache has one file for each value, mode 0600. A value that cannot be read or written counts as
missing. `memory_directory` finds a directory whose files are in memory; like any memory, they may
be swapped out. Source: proc_pid_mountinfo(5); tmpfs(5).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128

from supervisor.errors import AccessDenied, DiskFull, access_denied
from supervisor.output import size
from supervisor.system.paths import is_ours, make_ours, make_private

_KINDS: Final = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)
# Opening a device may have side effects, so the path is checked first. With O_NONBLOCK the open
# does not hang if a pipe replaces the file in between.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NotRegular(OSError):
    """The path is not a regular file; `strerror` names its kind."""


def expand_home(path: Path) -> Path:
    """Expand `~`; a path whose home directory is unknown is returned unchanged."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def is_regular(path: Path) -> bool:
    try:
        stat_regular(path)
    except OSError:
        return False
    return True


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading; follows symbolic links.

    Raises NotRegular for a directory, pipe, socket or device, and OSError, also for an invalid
    path.
    """
    stat_regular(path)
    file = os.fdopen(os.open(path, _FLAGS), "rb")
    try:
        _check(os.fstat(file.fileno()))
    except NotRegular:
        file.close()
        raise
    return file


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; raises OSError if the file is unreadable."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def xxh3_of(path: Path) -> str:
    """Return the XXH3 of a file, 32 hex digits; it finds damage, not forgery. Raises OSError."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, xxh3_128).hexdigest()


def stat_regular(path: Path) -> os.stat_result:
    """Stat a regular file; raises as `open_regular`."""
    try:
        found = path.stat()
    except ValueError as error:  # a NUL character
        raise OSError(None, str(error)) from error
    _check(found)
    return found


def check_new(path: Path) -> None:
    """Raise AccessDenied if a file that `--output` names exists, or cannot be created."""
    if os.path.lexists(path):
        hint = "move it away, or name another file with --output"
        raise AccessDenied(f"{path} exists already", hint=hint)
    if not os.access(path.absolute().parent, os.W_OK):
        hint = "name a file in a directory that exists and is yours to write"
        raise AccessDenied(f"cannot write {path}", hint=hint)


def create_new(path: Path) -> int:
    """Create a file of mode 0600, and return its descriptor; raises AccessDenied."""
    check_new(path)
    with access_denied(f"cannot write {path}"):
        return os.open(path, _NEW, 0o600)


def write_atomic(
    path: Path, content: str | bytes | Iterator[bytes], *, durable: bool = True
) -> None:
    """Replace a file atomically, with mode 0600; text is UTF-8 and keeps its line ends.

    Unless `durable`, a crash of the machine may lose the file. Raises OSError: nothing was written;
    an existing file is unchanged.
    """
    content = content.encode() if isinstance(content, str) else content
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def rewrite(path: Path, text: str) -> None:
    """Replace a file as `write_atomic` does, but keep its mode, CRLF line ends, and links to it."""
    path = path.resolve()
    mode = path.stat().st_mode
    before = path.read_bytes()
    if before.count(b"\n") == before.count(b"\r\n") > 0:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    write_atomic(path, text)
    path.chmod(mode)


def back_up(path: Path) -> Path:
    """Copy a file to `NAME.TIME.bak` beside it, mode 0600, and return the copy's path."""
    backup = path.with_name(f"{path.name}.{datetime.now().astimezone():%Y%m%d-%H%M%S}.bak")
    write_atomic(backup, path.read_bytes())
    return backup


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check(found: os.stat_result) -> None:
    if stat.S_ISREG(found.st_mode):
        return
    reason = next(
        (text for is_kind, text in _KINDS if is_kind(found.st_mode)), "is not a regular file"
    )
    raise NotRegular(None, reason)


def check_space(directory: Path, wanted_bytes: int, subject: str, hint: str) -> None:
    """Raise DiskFull if the file system of a directory, which need not exist yet, has less space.

    `subject` is the part of the message before the size.
    """
    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free_bytes = shutil.disk_usage(there).free
    if wanted_bytes > free_bytes:
        message = f"{subject} {size(wanted_bytes)}, but {there} has {size(free_bytes)} free"
        raise DiskFull(message, hint=hint)


@contextlib.contextmanager
def translate_disk_errors(directory: Path, variable: str, name: str = "") -> Iterator[None]:
    """Raise DiskFull or AccessDenied for an OSError; `variable` can set another directory."""
    try:
        yield
    except OSError as error:
        where = f"{name} in {directory}" if name else f"in {directory}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise DiskFull(
                f"no space is left for {where}" if name else f"no space is left {where}",
                hint="free some space, then run the same command again; "
                "it continues where it stopped",
            ) from error
        raise AccessDenied(
            f"cannot write {where}: {error.strerror or error}",
            hint=f"make it writable, or set {variable} to another directory",
        ) from error


def key_of(files: Iterable[Path], *more: str) -> str:
    """Return a cache key for these versions of files and texts. Raises OSError: one is missing."""
    parts = [*more]
    for path in files:
        found = path.stat()
        parts.append(f"{path} {found.st_size} {found.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def get(directory: Path, key: str) -> dict[str, Any] | None:
    """Return a value; None if it is missing, or if another user could have written it."""
    if not is_ours(directory):
        return None
    try:
        found = json.loads((directory / f"{key}.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def put(directory: Path, key: str, value: Mapping[str, Any]) -> None:
    """Store a value; errors of the disk are ignored."""
    with contextlib.suppress(OSError, AccessDenied):
        make_ours(directory.parent)
        make_private(directory)
        write_atomic(directory / f"{key}.json", json.dumps(value), durable=False)


_MOUNTS: Final = Path("/proc/self/mountinfo")
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 (a private directory in it)


def memory_directory(runtime: Path, name: str) -> Path | None:
    """Return the path for a directory in memory; None if this machine has no such file system.

    It is in the runtime directory if that is in memory, otherwise in /dev/shm.
    """
    if is_in_memory(runtime):
        return runtime / name
    if is_in_memory(_SHARED_MEMORY):
        digest = hashlib.sha256(f"{os.geteuid()} {runtime}".encode()).hexdigest()[:16]
        return _SHARED_MEMORY / f"llama-corral-{digest}-{name}"
    return None


def is_in_memory(path: Path) -> bool:
    """Return whether the files of a directory, which need not exist yet, are in memory."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        device, mounts = path.stat().st_dev, _MOUNTS.read_text("utf-8", "surrogateescape")
    except OSError:
        return False
    return kind_of_device(mounts, f"{os.major(device)}:{os.minor(device)}") in {"tmpfs", "ramfs"}


def kind_of_device(mounts: str, device: str) -> str | None:
    """Return the file system type of a device, given as `major:minor`."""
    for line in mounts.splitlines():
        words, _, after = line.partition(" - ")
        if words.split()[2:3] == [device]:
            return after.split()[0]
    return None
