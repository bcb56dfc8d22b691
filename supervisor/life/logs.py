"""What an engine says: the last of it in memory, all of it in a file that never grows too large.

Both take raw bytes as they come from a pipe, so that a flood or a line without end costs a copy and
nothing else. Nobody ever waits for a log: when the disk is full, bytes are dropped and counted.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Self

from supervisor.errors import StateDenied
from supervisor.life.lines import LINE_MAX_BYTES

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

    Raises:
        StateDenied: The file cannot be opened for writing.
    """

    def __init__(
        self, path: Path, *, size_bytes: int = _FILE_BYTES, kept: int = _FILES_KEPT
    ) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self._kept = kept
        self._lost_bytes = 0
        self._fd = _open(path)
        self._written_bytes = os.fstat(self._fd).st_size

    def write(self, chunk: bytes) -> None:
        """Append bytes. Never fails: what the disk does not take is dropped and counted."""
        try:
            if self._written_bytes + len(chunk) > self._size_bytes and self._written_bytes:
                self._set_aside()
            self._append(self._apology() + chunk)
        except OSError:
            self._lost_bytes += len(chunk)
        else:
            self._lost_bytes = 0

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _append(self, chunk: bytes) -> None:
        view = memoryview(chunk)
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
        os.close(self._fd)
        self._fd, self._written_bytes = fresh, 0


def _aside(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def _open(path: Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise StateDenied(
            f"cannot write the log {path}: {error.strerror}",
            hint="make its directory yours and writable, or set CORRAL_LOG_DIR to another",
        ) from error
