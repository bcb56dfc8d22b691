"""What an engine says: the last of it in memory, all of it in a file that never grows too large.

Both take raw bytes as they come from a pipe, so that a flood or a line without end costs a copy and
nothing else. Nobody ever waits for a log: when the disk is full, bytes are dropped and counted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Self

from supervisor.errors import AccessDenied
from supervisor.process.lines import LINE_MAX_BYTES

_RING_BYTES: Final = 256 * 1024
_FILE_BYTES: Final = 16 * 1024**2
_FILES_KEPT: Final = 3


class LogRing:
    """The last bytes of a stream, with long lines cut.

    Args:
        size_bytes: How much is kept; up to twice as much is held for a moment.
    """

    def __init__(self, size_bytes: int = _RING_BYTES) -> None:
        self._size_bytes = size_bytes
        self._bytes = bytearray()
        self._open_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Add bytes; what a line has beyond LINE_MAX_BYTES is dropped."""
        first, *others = chunk.split(b"\n")
        room = max(0, LINE_MAX_BYTES - self._open_bytes)
        kept = [first[:room], *(piece[:LINE_MAX_BYTES] for piece in others)]
        self._bytes += b"\n".join(kept)
        self._open_bytes = len(others[-1]) if others else self._open_bytes + len(first)
        if len(self._bytes) > 2 * self._size_bytes:
            del self._bytes[: -self._size_bytes]

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return up to `count` last lines, oldest first, an unfinished one included."""
        text = bytes(self._bytes[-self._size_bytes :]).decode(errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        return tuple(line.rstrip("\r") for line in lines[-count:])


class LogFile:
    """A file that is appended to, and set aside as NAME.1, NAME.2 … when it is full.

    Opened without following a symbolic link, for its owner only. Use it as a context manager, or
    call `close`.

    Args:
        path: Where to write. The directory must exist.
        size_bytes: Size at which the file is set aside.
        kept: How many files set aside are kept.
        streams: Descriptors of ours that write to the same file, and follow it when it is set
            aside: else what a library or the interpreter prints would go on in the old one.

    Raises:
        AccessDenied: The file cannot be opened for writing.
    """

    def __init__(
        self,
        path: Path,
        *,
        size_bytes: int = _FILE_BYTES,
        kept: int = _FILES_KEPT,
        streams: Sequence[int] = (),
    ) -> None:
        self._streams = streams
        self._path = path
        self._size_bytes = size_bytes
        self._kept = kept
        self._lost_bytes = 0
        self._fd = open_log(path)
        self._written_bytes = os.fstat(self._fd).st_size

    def write(self, chunk: bytes) -> None:
        """Append bytes. Never fails: what the disk does not take is dropped and counted."""
        try:
            for piece in _pieces(self._apology() + chunk, self._size_bytes):
                self._make_room(len(piece))
                self._append(piece)
        except OSError:
            self._lost_bytes += len(chunk)
        else:
            self._lost_bytes = 0

    def _make_room(self, more_bytes: int) -> None:
        if self._streams:
            self._written_bytes = os.fstat(self._fd).st_size
        if self._written_bytes + more_bytes > self._size_bytes and self._written_bytes:
            self._set_aside()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, view: memoryview) -> None:
        while view:
            taken = os.write(self._fd, view)
            self._written_bytes += taken
            view = view[taken:]

    def _apology(self) -> bytes:
        lost = self._lost_bytes
        return f"\n[llama-corral: the disk refused {lost} bytes here]\n".encode() if lost else b""

    def _set_aside(self) -> None:
        """Rename NAME to NAME.1, NAME.1 to NAME.2 …; the oldest is overwritten."""
        names = [self._path, *(_aside(self._path, n) for n in range(1, self._kept + 1))]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)
        fresh = os.open(self._path, _FLAGS | os.O_TRUNC, 0o600)
        for stream in self._streams:
            os.dup2(fresh, stream)
        os.close(self._fd)
        self._fd, self._written_bytes = fresh, 0


def _pieces(chunk: bytes, size_bytes: int) -> Iterator[memoryview]:
    """Yield a chunk in pieces that a file has room for."""
    view = memoryview(chunk)
    for start in range(0, len(view), size_bytes):
        yield view[start : start + size_bytes]


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


# Without O_NONBLOCK a pipe in a log's place would hold us up.
_FLAGS: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)


def open_log(path: Path) -> int:
    """Open a log to append to, made for its owner only, and return the descriptor.

    Raises:
        AccessDenied: It cannot be opened, is a link or no regular file, or another user's.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
        found = os.fstat(descriptor)
    except OSError as error:
        raise _denied(path, error.strerror) from error
    if reason := _fault(found.st_mode, found.st_uid, found.st_nlink, os.geteuid()):
        os.close(descriptor)
        raise _denied(path, reason)
    if found.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)
    return descriptor


def _fault(mode: int, uid: int, links: int, ours: int) -> str | None:
    """Return why a file is no log of ours. Pure."""
    if not stat.S_ISREG(mode):
        return "it is no regular file"
    if uid != ours:
        return f"it belongs to another user (uid {uid})"
    return "it has a second name (a hard link)" if links > 1 else None


def _denied(path: Path, reason: str | None) -> AccessDenied:
    return AccessDenied(
        f"cannot write the log {path}: {reason}",
        hint="remove what stands there, or set CORRAL_LOG_DIR to a directory of your own",
    )
