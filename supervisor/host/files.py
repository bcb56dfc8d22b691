"""Reads files that users name (regular ones only: a pipe would block), and writes atomically."""

from __future__ import annotations

import os
import stat
import tempfile
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from typing import Final

_KINDS: Final = (
    (stat.S_ISDIR, "is a directory"),
    (stat.S_ISFIFO, "is a pipe"),
    (stat.S_ISSOCK, "is a socket"),
    (stat.S_ISCHR, "is a device"),
    (stat.S_ISBLK, "is a device"),
)
# Opening a device may have an effect, so the path is checked first; O_NONBLOCK is for a pipe that
# replaces the file in between.
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class NotRegular(OSError):
    """The path is not that of a regular file; `strerror` says of what."""


def expanded(path: Path) -> Path:
    """Expand `~`; a path whose home directory does not exist stays as it is."""
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

    Raises:
        NotRegular: It is a directory, a pipe, a socket or a device.
        OSError: It cannot be opened, or the path is invalid.
    """
    stat_regular(path)
    file = os.fdopen(os.open(path, _FLAGS), "rb")
    try:
        _check(os.fstat(file.fileno()))
    except NotRegular:
        file.close()
        raise
    return file


def stat_regular(path: Path) -> os.stat_result:
    """Stat a regular file; raises as `open_regular`."""
    try:
        found = path.stat()
    except ValueError as error:  # a NUL character
        raise OSError(None, str(error)) from error
    _check(found)
    return found


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace a file, mode 0600, as a whole; unless `durable`, a crash of the machine may lose it.

    Text is written in UTF-8, with its line ends.

    Raises:
        OSError: Nothing was written; a file of that name is unchanged.
    """
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
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
    """Replace a file as `write_atomic`, and keep its mode and CRLF line ends."""
    mode = path.stat().st_mode
    before = path.read_bytes()
    if before.count(b"\n") == before.count(b"\r\n") > 0:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    write_atomic(path, text)
    path.chmod(mode)


def back_up(path: Path) -> Path:
    """Copy a file to one beside it, mode 0600, that is named after the time; return that."""
    backup = path.with_name(f"{path.name}.{datetime.now().astimezone():%Y%m%d-%H%M%S}.bak")
    write_atomic(backup, path.read_bytes())
    return backup


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
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
