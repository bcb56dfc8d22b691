"""Extracts an archive into a directory of its own, with limits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from supervisor.releases.archive import ArchiveRefused, Entry, entries

_CHUNK_BYTES: Final = 1024**2
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Releases expand to four times their size at most, b10621's CPU build for Linux to 3.6 times.
_EXPANSION_MAX: Final = 50
_SMALL_BYTES: Final = 64 * 1024**2

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class ExtractLimits:
    """What an archive may contain."""

    total_bytes: int
    entries: int = 20_000

    @classmethod
    def for_archive(cls, size_bytes: int) -> ExtractLimits:
        return cls(max(_SMALL_BYTES, size_bytes * _EXPANSION_MAX))


def extract(
    archive: Path, target: Path, limits: ExtractLimits, progress: Progress = lambda _: None
) -> None:
    """Extract an archive into a new directory; files are on the disk when it returns.

    Raises:
        ArchiveRefused: It is damaged, too large, or not safe.
        OSError: The directory cannot be written.
    """
    target.mkdir(mode=0o700)
    total_bytes = 0
    with entries(archive, limits.total_bytes) as found:
        for count, (entry, content) in enumerate(found):
            if count >= limits.entries:
                raise ArchiveRefused(f"it has more than {limits.entries} entries")
            for written in _put(target, entry, content):
                total_bytes += written
                if total_bytes > limits.total_bytes:
                    raise ArchiveRefused(f"it expands to more than {limits.total_bytes} bytes")
                progress(total_bytes)


def _put(target: Path, entry: Entry, content: IO[bytes] | None) -> Iterator[int]:
    """Create an entry; yields the bytes of each write."""
    is_directory = entry.kind == "directory"
    directory = _make_directories(target, entry.path if is_directory else entry.path.parent)
    path = directory / entry.path.name
    try:
        if entry.kind == "link":
            path.symlink_to(entry.target)
        elif content is not None:
            yield from _write(path, content, 0o755 if entry.is_executable else 0o644)
    except FileExistsError as error:
        raise ArchiveRefused(f"it has two entries named {entry.path}") from error


def _make_directories(target: Path, path: PurePosixPath) -> Path:
    """Create a directory and those above it, none of which may be a link."""
    for part in path.parts:
        target /= part
        if target.is_symlink() or not _made(target).is_dir():
            raise ArchiveRefused(f"it has an entry below {path}, which is no directory")
    return target


def _made(directory: Path) -> Path:
    with suppress(FileExistsError):
        directory.mkdir(mode=0o755)
    return directory


def _write(path: Path, content: IO[bytes], mode: int) -> Iterator[int]:
    with os.fdopen(os.open(path, _NEW, mode), "wb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            yield file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
