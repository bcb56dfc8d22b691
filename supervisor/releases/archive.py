"""Reads the entries of `.tar.gz` and `.zip`, and says where each may be put.

An entry is a file, a directory, or a link to a file beside it. Others, and names that lead out of
the archive's directory, are refused. What is read is counted, headers too: some kilobytes can
expand to any size.
"""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal

Kind = Literal["file", "directory", "link"]

_NAME_MAX_BYTES: Final = 255  # of one part. Source: limits.h, NAME_MAX
_DEPTH_MAX: Final = 16
_READ_MAX_BYTES: Final = 16 * 1024**2
_EXECUTABLE: Final = 0o100


class ArchiveRefused(Exception):
    """An archive is damaged or not safe; the text is a clause that says how."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry; `target` is the name that a link leads to."""

    path: PurePosixPath
    kind: Kind
    is_executable: bool = False
    target: str = ""


def safe_path(name: str) -> PurePosixPath | None:
    """Return where an entry belongs; None for the archive's directory itself.

    Raises:
        ArchiveRefused: It leads elsewhere, or no file can have this name.
    """
    path = PurePosixPath(name)
    is_outside = path.is_absolute() or ".." in path.parts
    is_odd = "\\" in name or not name.isprintable() or len(path.parts) > _DEPTH_MAX
    is_long = any(len(part.encode()) > _NAME_MAX_BYTES for part in path.parts)
    if is_outside or is_odd or is_long:
        raise ArchiveRefused(f"its entry {name[:80]!r} leads out of it, or cannot be a file")
    return path if path.parts else None


def safe_link(name: str, target: str) -> str:
    """Return the target of a link, which is a file beside it.

    Raises:
        ArchiveRefused: It may be another.
    """
    if not target or target in {".", ".."} or "/" in target or safe_path(target) is None:
        raise ArchiveRefused(f"its entry {name[:80]!r} is a link to {target[:80]!r}")
    return target


@contextmanager
def entries(path: Path, limit_bytes: int) -> Iterator[Iterator[tuple[Entry, IO[bytes] | None]]]:
    """Read an archive, whose format its name says; each file is read before the next entry.

    Raises:
        ArchiveRefused: As above, or it has more than `limit_bytes`.
    """
    try:
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                yield _zip_entries(archive)
        else:
            with (
                gzip.open(path) as unpacked,
                tarfile.open(fileobj=Bounded(unpacked, limit_bytes), mode="r:") as tar,
            ):
                yield _tar_entries(tar)
    except (
        *(tarfile.TarError, zipfile.BadZipFile, zlib.error, gzip.BadGzipFile),
        *(EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError),
    ) as error:
        raise ArchiveRefused(f"it is damaged: {error}") from error


def unpacked_bytes(path: Path) -> int:
    """Return about how many bytes an archive says it has, for a meter; 0 if it does not.

    Source: RFC 1952, ISIZE.
    """
    if path.name.endswith(".zip"):
        return 0
    with path.open("rb") as file:
        file.seek(0, io.SEEK_END)
        file.seek(max(0, file.tell() - 4))
        return int.from_bytes(file.read(4), "little")


class Bounded(io.RawIOBase):
    """A file of which no more than a number of bytes is read."""

    def __init__(self, file: gzip.GzipFile, limit_bytes: int) -> None:
        self._file = file
        self._limit_bytes = limit_bytes

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _READ_MAX_BYTES:
            raise ArchiveRefused("it has a header of many megabytes")
        self._check(self._file.tell() + size)
        return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check(offset)
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _check(self, position: int) -> None:
        # A block may be asked for that is not there.
        if position > self._limit_bytes + tarfile.RECORDSIZE:
            raise ArchiveRefused(f"it expands to more than {self._limit_bytes} bytes")


def _tar_entries(tar: tarfile.TarFile) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep the headers of all
        if (path := safe_path(member.name)) is None:
            continue
        if member.isdir():
            yield Entry(path, "directory"), None
        elif member.issym():
            yield Entry(path, "link", target=safe_link(member.name, member.linkname)), None
        elif member.isreg() and not member.issparse():
            yield Entry(path, "file", bool(member.mode & _EXECUTABLE)), tar.extractfile(member)
        else:
            raise ArchiveRefused(f"its entry {member.name[:80]!r} is no file, directory or link")


def _zip_entries(archive: zipfile.ZipFile) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    for member in archive.infolist():
        if (path := safe_path(member.filename)) is None:
            continue
        mode = member.external_attr >> 16  # Source: APPNOTE.TXT; Info-ZIP writes st_mode there
        if member.is_dir():
            yield Entry(path, "directory"), None
            continue
        with archive.open(member) as file:
            if stat.S_ISLNK(mode):
                target = file.read(_NAME_MAX_BYTES + 1).decode()
                yield Entry(path, "link", target=safe_link(member.filename, target)), None
            elif stat.S_IFMT(mode) in {0, stat.S_IFREG}:
                yield Entry(path, "file", bool(mode & _EXECUTABLE)), file
            else:
                raise ArchiveRefused(f"its entry {member.filename[:80]!r} is no file")
