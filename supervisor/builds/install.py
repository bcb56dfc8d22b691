"""Installs a release: downloads it, extracts its archives, and runs its program. Blocks.

A build gets its directory only after its program has run on this machine. Until then its files are
in a directory whose name begins with a dot. An interrupted command leaves only a partial download,
which the next command resumes.

An archive (`.tar.gz` or `.zip`) may contain files, directories, and links to files in the same
directory. Other entries, and names that lead out of the archive's directory, are refused. All bytes
are counted, headers too, because some kilobytes can expand to any size.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Final, Literal

from supervisor.builds import discover
from supervisor.builds.discover import Engine
from supervisor.builds.installed import REMOVED, InstalledBuild, files_of, write_build
from supervisor.builds.releases import Asset
from supervisor.builds.variant import Choice
from supervisor.errors import CorralError, DownloadFailed, EngineBroken
from supervisor.system.download import PART, Client, RemoteFile, download
from supervisor.system.files import check_space, sync

Kind = Literal["file", "directory", "link"]

_NAME_MAX_BYTES: Final = 255  # of one part. Source: limits.h, NAME_MAX
_DEPTH_MAX: Final = 16
_READ_MAX_BYTES: Final = 16 * 1024**2
_EXECUTABLE: Final = 0o100


class ArchiveRefused(Exception):
    """An archive is damaged or not safe; the text is a clause that says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of an archive; `target` is the file name that a link points to."""

    path: PurePosixPath
    kind: Kind
    is_executable: bool = False
    target: str = ""


def safe_path(name: str) -> PurePosixPath | None:
    """Return an entry's path, None for the archive's directory; raises ArchiveRefused if unsafe."""
    path = PurePosixPath(name)
    is_outside = path.is_absolute() or ".." in path.parts
    is_odd = "\\" in name or not name.isprintable() or len(path.parts) > _DEPTH_MAX
    is_long = any(len(part.encode()) > _NAME_MAX_BYTES for part in path.parts)
    if is_outside or is_odd or is_long:
        raise ArchiveRefused(f"its entry {name[:80]!r} leads out of it, or cannot be a file")
    return path if path.parts else None


def safe_link(name: str, target: str) -> str:
    """Return a link's target; raises ArchiveRefused if it may be outside the link's directory."""
    if not target or target in {".", ".."} or "/" in target or safe_path(target) is None:
        raise ArchiveRefused(f"its entry {name[:80]!r} is a link to {target[:80]!r}")
    return target


@contextmanager
def entries(path: Path, limit_bytes: int) -> Iterator[Iterator[tuple[Entry, IO[bytes] | None]]]:
    """Open an archive; its name's ending tells the format.

    Each file of its entries must be read before the next entry. Raises ArchiveRefused if it is
    damaged or not safe, or expands to more than `limit_bytes`.
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
    """Return about how many bytes an archive claims to expand to, for a meter; 0 if unknown.

    Source: RFC 1952, ISIZE.
    """
    if path.name.endswith(".zip"):
        return 0
    with path.open("rb") as file:
        file.seek(0, io.SEEK_END)
        file.seek(max(0, file.tell() - 4))
        return int.from_bytes(file.read(4), "little")


class Bounded(io.RawIOBase):
    """A file that raises ArchiveRefused once more than `limit_bytes` are read."""

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
        # tarfile may read a block beyond the end.
        if position > self._limit_bytes + tarfile.RECORDSIZE:
            raise ArchiveRefused(f"it expands to more than {self._limit_bytes} bytes")


def _tar_entries(tar: tarfile.TarFile) -> Iterator[tuple[Entry, IO[bytes] | None]]:
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep all headers
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


_CHUNK_BYTES: Final = 1024**2
_CREATE_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Releases expand to at most four times their size; b10621's CPU build for Linux, to 3.6 times.
_EXPANSION_MAX: Final = 50
_SMALL_BYTES: Final = 64 * 1024**2


def expanded_max_bytes(archive_bytes: int) -> int:
    return max(_SMALL_BYTES, archive_bytes * _EXPANSION_MAX)


def extract(
    archive: Path,
    target: Path,
    max_bytes: int,
    progress: Callable[[int], None] = lambda _: None,
    *,
    max_entries: int = 20_000,
    is_durable: bool = True,
) -> None:
    """Extract an archive into a new directory; if `is_durable`, all files are then on the disk.

    `progress` receives the bytes written so far. Raises ArchiveRefused if it is damaged, too large
    or not safe, and OSError if the directory cannot be written.
    """
    target.mkdir(mode=0o700)
    total_bytes = 0
    with entries(archive, max_bytes) as found:
        for count, (entry, content) in enumerate(found):
            if count >= max_entries:
                raise ArchiveRefused(f"it has more than {max_entries} entries")
            for written in _put(target, entry, content, is_durable=is_durable):
                total_bytes += written
                if total_bytes > max_bytes:
                    raise ArchiveRefused(f"it expands to more than {max_bytes} bytes")
                progress(total_bytes)


def _put(
    target: Path, entry: Entry, content: IO[bytes] | None, *, is_durable: bool
) -> Iterator[int]:
    is_directory = entry.kind == "directory"
    directory = _make_directories(target, entry.path if is_directory else entry.path.parent)
    path = directory / entry.path.name
    try:
        if entry.kind == "link":
            path.symlink_to(entry.target)
        elif content is not None:
            mode = 0o755 if entry.is_executable else 0o644
            with os.fdopen(os.open(path, _CREATE_NEW, mode), "wb") as file:
                while chunk := content.read(_CHUNK_BYTES):
                    yield file.write(chunk)
                file.flush()
                if is_durable:
                    os.fsync(file.fileno())
    except FileExistsError as error:
        raise ArchiveRefused(f"it has two entries named {entry.path}") from error


def _make_directories(target: Path, path: PurePosixPath) -> Path:
    """Create a directory and its parents, none of which may be a link."""
    for part in path.parts:
        target /= part
        with suppress(FileExistsError):
            target.mkdir(mode=0o755)
        if target.is_symlink() or not target.is_dir():
            raise ArchiveRefused(f"it has an entry below {path}, which is no directory")
    return target


# Receives a stage (`download NAME`, `extract NAME`), bytes done and bytes in all.
Progress = Callable[[str, int, int], None]


def unpack(archive: Path, new: Path, progress: Progress) -> None:
    """Add an archive's files below its innermost common directory; existing files stay."""
    scratch, whole = new / "archive", unpacked_bytes(archive)
    files = files_of(new)
    try:
        extract(
            archive,
            scratch,
            expanded_max_bytes(archive.stat().st_size),
            lambda done: progress(f"extract {archive.name}", done, whole),
        )
        files.mkdir(mode=0o755, exist_ok=True)
        for path in _content_of(scratch).iterdir():
            if not os.path.lexists(files / path.name):
                path.rename(files / path.name)
    except ArchiveRefused as error:
        raise refusal(archive, error) from error
    shutil.rmtree(scratch, ignore_errors=True)


def refusal(archive: Path, reason: ArchiveRefused) -> DownloadFailed:
    """Remove an archive that is refused, and return the error of its command."""
    archive.unlink()
    return DownloadFailed(
        f"{archive.name} is refused: {reason}",
        hint="it was removed; nothing of it was installed, and another build may be sound",
    )


def _content_of(directory: Path) -> Path:
    """Return the outermost directory whose content is not just a single directory."""
    while True:
        found = list(directory.iterdir())
        if len(found) != 1 or found[0].is_symlink() or not found[0].is_dir():
            return directory
        directory = found[0]


_DOWNLOADS: Final = ".downloads"
_NEW: Final = ".new"
# The archives and their content, which is four times as large for b10621's CPU build for Linux.
_DISK_PER_DOWNLOADED_BYTE: Final = 5


def install(
    choice: Choice, engines_dir: Path, client: Client, mirror: str | None, progress: Progress
) -> tuple[InstalledBuild, Engine]:
    """Install the files of a release, and return the build and its engine.

    The caller holds the lock of `engines_dir`. `client` follows redirects. `mirror` is a URL with
    the files below `TAG/`, or None to use the release's own URLs.

    Raises DownloadFailed if a file cannot be fetched or its hash is wrong, EngineBroken if the
    engine does not run on this machine, DiskFull, or OSError if the directory cannot be written.
    """
    files = [_remote(asset, choice.engine.tag, mirror) for asset in choice.assets]
    need_bytes = choice.size_bytes * _DISK_PER_DOWNLOADED_BYTE
    with new_build(choice.name, engines_dir, need_bytes) as (new, downloads):
        archives = [
            download(
                client, file, downloads, partial(progress, f"download {file.name}"), "the release"
            )
            for file in files
        ]
        for archive in archives:
            unpack(archive, new, progress)
        digests = {asset.name: asset.sha256 or "" for asset in choice.assets}
        build, engine = add_description(new, choice.name, choice.engine.full_variant, digests)
    return build, engine


@contextmanager
def new_build(name: str, engines_dir: Path, need_bytes: int) -> Iterator[tuple[Path, Path]]:
    """Yield a directory for a build, and one for its downloads.

    The build gets its name if the block returns normally; otherwise it is removed, and the
    downloads stay as `_downloads` says. Raises DiskFull if less space than `need_bytes` is free.
    """
    for prefix in (_NEW, REMOVED):  # left by a command that was killed
        for path in engines_dir.glob(f"{prefix}-*"):
            shutil.rmtree(path)
    new = engines_dir / f"{_NEW}-{name}"
    with _downloads(engines_dir / _DOWNLOADS) as downloads:
        there_bytes = sum(path.stat().st_size for path in downloads.iterdir())
        hint = "free some space, or set CORRAL_DATA_DIR to another directory"
        check_space(engines_dir, need_bytes - there_bytes, f"{name} takes about", hint)
        new.mkdir(mode=0o700)
        try:
            yield new, downloads
            sync(new)
            new.rename(engines_dir / name)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    sync(engines_dir)


@contextmanager
def _downloads(directory: Path) -> Iterator[Path]:
    """Make the directory of downloads, and keep only partial files in it after an error."""
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        yield directory
    except CorralError:
        for path in directory.iterdir():
            if path.suffix != PART:
                path.unlink()
        with suppress(OSError):
            directory.rmdir()
        raise
    shutil.rmtree(directory)


def _remote(asset: Asset, tag: str, mirror: str | None) -> RemoteFile:
    if asset.sha256 is None:
        raise DownloadFailed(
            f"the release does not say the SHA-256 of {asset.name}, so it is not installed",
            hint="releases before June 2025 have none: choose a newer one, "
            "or extract it yourself and set engine to the path of its llama-server",
        )
    url = f"{mirror}/{tag}/{asset.name}" if mirror else asset.url
    return RemoteFile(asset.name, url, asset.size_bytes, asset.sha256)


def add_description(
    new: Path, name: str, variant: str, archives: Mapping[str, str]
) -> tuple[InstalledBuild, Engine]:
    """Run a build's engine, and describe the build in its directory.

    `archives` has the SHA-256 of each by its name. Raises EngineBroken if the engine does not run,
    or there is none.
    """
    files = files_of(new)
    binary = next((program for program in discover.PROGRAMS if (files / program).is_file()), None)
    if binary is None:
        raise EngineBroken(f"{name} has neither {' nor '.join(discover.PROGRAMS)}")
    try:
        engine = discover.load(
            files / binary,
            cache_dir=new / "cache",
            places=discover.default_search_paths(new.parent),
        )
    except EngineBroken as error:
        reason = error.message.replace(str(files / binary), binary)
        raise EngineBroken(
            f"{name} cannot run on this machine, so it is not installed: {reason}",
            hint=error.hint,
        ) from error
    shutil.rmtree(new / "cache", ignore_errors=True)
    build = InstalledBuild(
        name=name,
        build=int(name.partition("-")[0].removeprefix("b")),
        variant=variant,
        binary=binary,
        archives=archives,
        installed_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    write_build(new, build)
    return build, engine
