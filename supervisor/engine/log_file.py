"""An engine's log: the last lines in memory, all of it in a file of bounded size, and reading it.

Writing takes raw bytes as they come from a pipe, so a flood or an endless line costs one copy. A
log never blocks: when the disk is full, bytes are dropped and counted.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Self

from attrs import define, field

from supervisor.errors import AccessDenied

LINE_MAX_BYTES: Final = 4096
_BLOCK_BYTES: Final = 64 * 1024
_LOOK_BACK_BYTES: Final = 4 * 1024**2
# Without O_NONBLOCK a pipe in place of the log would block.
_FLAGS: Final = (
    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
)


class LineSplitter:
    """Splits a stream of bytes into lines; cuts each line after `limit_bytes`."""

    def __init__(self, limit_bytes: int = LINE_MAX_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._open = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        first, *others = chunk.split(b"\n")
        self._open += first[: self._limit_bytes - len(self._open)]
        if not others:
            return []
        lines = [self._open, *(line[: self._limit_bytes] for line in others[:-1])]
        self._open = others[-1][: self._limit_bytes]
        return lines


class LogRing:
    """The last bytes of a stream; cuts long lines, and holds up to 2 * `size_bytes`."""

    def __init__(self, size_bytes: int = 256 * 1024) -> None:
        self._size_bytes = size_bytes
        self._bytes = bytearray()
        self._open_bytes = 0

    def feed(self, chunk: bytes) -> None:
        first, *others = chunk.split(b"\n")
        room = max(0, LINE_MAX_BYTES - self._open_bytes)
        kept = [first[:room], *(piece[:LINE_MAX_BYTES] for piece in others)]
        self._bytes += b"\n".join(kept)
        self._open_bytes = len(others[-1]) if others else self._open_bytes + len(first)
        if len(self._bytes) > 2 * self._size_bytes:
            del self._bytes[: -self._size_bytes]

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return the last lines, oldest first, including an unfinished one."""
        text = bytes(self._bytes[-self._size_bytes :]).decode(errors="replace")
        lines = text.removesuffix("\n").split("\n") if text else []
        return tuple(line.rstrip("\r") for line in lines[-count:])


@define(eq=False, slots=False)
class LogFile:
    """A file that is renamed to NAME.1, NAME.2 … when it is full.

    `streams` are descriptors of this process that write to the same file. After a rename they are
    redirected to the new file, because libraries print to them. Raises AccessDenied: the file
    cannot be opened for writing.
    """

    _path: Path
    _size_bytes: int = 16 * 1024**2
    _kept: int = 3
    _streams: Sequence[int] = ()
    _lost_bytes: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._fd = open_log(self._path)
        self._written_bytes = os.fstat(self._fd).st_size

    def write(self, chunk: bytes) -> None:
        """Append bytes; drop and count those that the disk refuses."""
        lost = self._lost_bytes
        notice = f"\n[llama-corral: the disk refused {lost} bytes here]\n".encode() if lost else b""
        left = memoryview(notice + chunk)
        try:
            while left:
                self._write_piece(left[: self._size_bytes])
                left = left[self._size_bytes :]
        except OSError:
            self._lost_bytes += len(chunk)
        else:
            self._lost_bytes = 0

    def _write_piece(self, piece: memoryview) -> None:
        """Write at most `size_bytes`, into a new file if the present one has no room."""
        if self._streams:
            self._written_bytes = os.fstat(self._fd).st_size
        if self._written_bytes + len(piece) > self._size_bytes and self._written_bytes:
            self._rotate()
        while piece:
            taken = os.write(self._fd, piece)
            self._written_bytes += taken
            piece = piece[taken:]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _rotate(self) -> None:
        old = (f"{self._path.name}.{number}" for number in range(1, self._kept + 1))
        names = [self._path, *map(self._path.with_name, old)]
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)
        fresh = os.open(self._path, _FLAGS | os.O_TRUNC, 0o600)
        for stream in self._streams:
            os.dup2(fresh, stream)
        os.close(self._fd)
        self._fd, self._written_bytes = fresh, 0


def open_log(path: Path) -> int:
    """Open a log for appending, mode 0600, and return the descriptor.

    Raises AccessDenied: it cannot be opened, is a link, is no regular file, or is another user's.
    """
    try:
        descriptor = os.open(path, _FLAGS, 0o600)
        found = os.fstat(descriptor)
    except OSError as error:
        raise _log_denied_error(path, error.strerror) from error
    if reason := _invalid_reason(found.st_mode, found.st_uid, found.st_nlink, os.geteuid()):
        os.close(descriptor)
        raise _log_denied_error(path, reason)
    if found.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)
    return descriptor


def _invalid_reason(mode: int, uid: int, links: int, our_uid: int) -> str | None:
    if not stat.S_ISREG(mode):
        return "it is not a regular file"
    if uid != our_uid:
        return f"it belongs to another user (uid {uid})"
    return "it has a hard link" if links > 1 else None


def _log_denied_error(path: Path, reason: str | None) -> AccessDenied:
    return AccessDenied(
        f"cannot write the log {path}: {reason}",
        hint="remove it, or set CORRAL_LOG_DIR to a directory of your own",
    )


def tail(path: Path, count: int) -> tuple[str, ...]:
    """Return at most `count` last lines of the last 4 MiB, oldest first; none without a file."""
    try:
        with path.open("rb") as file:
            _seek_back(file, count)
            data = file.read(_LOOK_BACK_BYTES)
    except FileNotFoundError:
        return ()
    return tuple(_text(line) for line in data.removesuffix(b"\n").split(b"\n")) if data else ()


async def follow(
    path: Path, count: int = 0, *, interval_s: float = 0.1
) -> AsyncGenerator[str, None]:
    """Yield up to `count` last lines, then each new line, until cancelled.

    Waits for a file that does not exist yet. Reads a renamed file to its end before the new one.
    """
    file = await _await_and_open(path, interval_s)
    try:
        _seek_back(file, count)
        lines = LineSplitter()
        while True:
            replaced = _is_replaced(file, path)
            while block := file.read(_BLOCK_BYTES):
                for line in lines.feed(block):
                    yield _text(line)
            if replaced:
                file.close()
                file = await _await_and_open(path, interval_s)
            else:
                await asyncio.sleep(interval_s)
    finally:
        file.close()


def _seek_back(file: BinaryIO, count: int) -> None:
    """Seek to the first of the last `count` lines, or _LOOK_BACK_BYTES back."""
    end = file.seek(0, os.SEEK_END)
    start, data = end, b""
    while start > 0 and data.count(b"\n") <= count and end - start < _LOOK_BACK_BYTES:
        step = min(_BLOCK_BYTES, start)
        start -= step
        file.seek(start)
        data = file.read(step) + data
    lines = data.removesuffix(b"\n").split(b"\n")
    before = lines[: max(0, len(lines) - count)]
    file.seek(min(end, start + sum(len(line) + 1 for line in before)))


async def _await_and_open(path: Path, interval_s: float) -> BinaryIO:
    while True:
        try:
            return path.open("rb")
        except FileNotFoundError:
            await asyncio.sleep(interval_s)


def _is_replaced(file: BinaryIO, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return True
    return there.st_ino != os.fstat(file.fileno()).st_ino


def _text(line: bytes) -> str:
    return line[:LINE_MAX_BYTES].rstrip(b"\r").decode(errors="replace")
