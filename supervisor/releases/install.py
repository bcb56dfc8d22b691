"""Installs the files of a release: downloads, extracts and runs them. Blocks.

A build gets its directory when its program has run on this machine. Until then its files are in a
directory that begins with a dot, and an interrupted command leaves nothing but a part of a
download, which the next one continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx

from supervisor.engines import discover, search
from supervisor.engines.changing import REMOVED
from supervisor.engines.discover import Engine
from supervisor.engines.installed import InstalledBuild, files_of, read_build, write_build
from supervisor.errors import CorralError, DiskFull, DownloadFailed, EngineBroken
from supervisor.host.files import sync
from supervisor.host.resumed_download import PART, RemoteFile, download
from supervisor.output import size
from supervisor.releases.release import Asset
from supervisor.releases.unpack import Progress, unpack
from supervisor.releases.variant import Choice

_DOWNLOADS: Final = ".downloads"
_NEW: Final = ".new"
# The archives, and what they expand to: four times as much for b10621's CPU build for Linux.
_DISK_PER_DOWNLOADED_BYTE: Final = 5
_NAMES: Final = ("llama-server", "llama")


@dataclass(frozen=True, slots=True)
class Installed:
    """A build that was installed just now, with the engine in it as this machine runs it."""

    build: InstalledBuild
    engine: Engine


def install(
    choice: Choice,
    engines_dir: Path,
    client: httpx.Client,
    mirror: str | None,
    progress: Progress,
) -> Installed:
    """Install the files of a release; the caller holds the directory of builds.

    Args:
        choice: The files.
        engines_dir: The directory of builds.
        client: Follows redirects.
        mirror: Where the files are, below the release's tag; None for where the release says.
        progress: For a meter.

    Raises:
        DownloadFailed: A file cannot be fetched, or is not what the release says.
        EngineBroken: The engine does not run on this machine.
        DiskFull: It does not fit on the disk.
        OSError: The directory cannot be written.
    """
    _clean(engines_dir)
    files = [_remote(one, choice.named.tag, mirror) for one in choice.assets]
    new = engines_dir / f"{_NEW}-{choice.name}"
    with _downloads(engines_dir / _DOWNLOADS) as downloads:
        _check_space(choice, downloads)
        archives = [_fetched(client, one, downloads, progress) for one in files]
        with _scratch(new):
            for archive in archives:
                unpack(archive, new, progress)
            made = _installed(choice, new)
            write_build(new, made.build)
            sync(new)
            new.rename(engines_dir / choice.name)
    sync(engines_dir)
    return made


def _check_space(choice: Choice, downloads: Path) -> None:
    there_bytes = sum(path.stat().st_size for path in downloads.iterdir())
    need_bytes = choice.size_bytes * _DISK_PER_DOWNLOADED_BYTE - there_bytes
    free_bytes = shutil.disk_usage(downloads).free
    if need_bytes > free_bytes:
        raise DiskFull(
            f"{choice.name} takes about {size(need_bytes)}, but {downloads.parent} has "
            f"{size(free_bytes)} free",
            hint="free some space, or set CORRAL_DATA_DIR to another directory",
        )


def _clean(engines_dir: Path) -> None:
    """Remove what a command that was killed left."""
    for prefix in (_NEW, REMOVED):
        for path in engines_dir.glob(f"{prefix}-*"):
            shutil.rmtree(path)


@contextmanager
def _downloads(directory: Path) -> Iterator[Path]:
    """Make the directory of downloads; a part that a later command can continue stays in it."""
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


@contextmanager
def _scratch(new: Path) -> Iterator[None]:
    new.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _remote(asset: Asset, tag: str, mirror: str | None) -> RemoteFile:
    if asset.sha256 is None:
        raise DownloadFailed(
            f"the release does not say the SHA-256 of {asset.name}, so it is not installed",
            hint="releases before June 2025 have none: choose a newer one, "
            "or extract it yourself and set engine to the path of its llama-server",
        )
    url = f"{mirror}/{tag}/{asset.name}" if mirror else asset.url
    return RemoteFile(asset.name, url, asset.sha256, asset.size_bytes)


def _fetched(client: httpx.Client, file: RemoteFile, downloads: Path, progress: Progress) -> Path:
    def step(done: int, whole: int) -> None:
        progress(f"download {file.name}", done, whole)

    return download(client, file, downloads, step, "the release")


def _installed(choice: Choice, new: Path) -> Installed:
    """Run the engine.

    Raises:
        EngineBroken: It does not run, or there is none.
    """
    files = files_of(new)
    binary = next((name for name in _NAMES if (files / name).is_file()), None)
    if binary is None:
        raise EngineBroken(f"{choice.name} has neither {' nor '.join(_NAMES)}")
    try:
        engine = discover.load(
            files / binary, cache_dir=new / "cache", places=search.here(new.parent)
        )
    except EngineBroken as error:
        reason = error.message.replace(str(files / binary), binary)
        raise EngineBroken(
            f"{choice.name} cannot run on this machine, so it is not installed: {reason}",
            hint=error.hint,
        ) from error
    shutil.rmtree(new / "cache", ignore_errors=True)
    return Installed(_describe(choice, binary), engine)


def _describe(choice: Choice, binary: str) -> InstalledBuild:
    return InstalledBuild(
        name=choice.name,
        build=int(choice.named.tag.removeprefix("b")),
        variant=choice.named.full_variant,
        binary=binary,
        archives={one.name: one.sha256 or "" for one in choice.assets},
        installed_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def installed_already(choice: Choice, engines_dir: Path) -> InstalledBuild | None:
    return read_build(engines_dir / choice.name)
