"""Moves what an archive of a release contains to the files of a build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from supervisor.engines.installed import files_of
from supervisor.errors import DownloadFailed
from supervisor.releases.archive import ArchiveRefused, unpacked_bytes
from supervisor.releases.extract import ExtractLimits, extract

# Receives a stage (`download NAME`, `extract NAME`), bytes done and bytes in all.
Progress = Callable[[str, int, int], None]


def unpack(archive: Path, new: Path, progress: Progress) -> None:
    """Extract an archive, and move what is in its innermost common directory to the files."""
    scratch, size_bytes = new / "archive", archive.stat().st_size
    limits, whole = ExtractLimits.for_archive(size_bytes), unpacked_bytes(archive)
    try:
        extract(
            archive, scratch, limits, lambda done: progress(f"extract {archive.name}", done, whole)
        )
        _move(_content_of(scratch), files_of(new))
    except ArchiveRefused as error:
        archive.unlink()
        raise DownloadFailed(
            f"{archive.name} is refused: {error}",
            hint="it was removed; nothing of it was installed, and another build may be sound",
        ) from error
    shutil.rmtree(scratch, ignore_errors=True)


def _content_of(directory: Path) -> Path:
    """Return the first directory that has more than another directory in it."""
    while True:
        found = list(directory.iterdir())
        if len(found) != 1 or found[0].is_symlink() or not found[0].is_dir():
            return directory
        directory = found[0]


def _move(source: Path, target: Path) -> None:
    """Move what a directory contains; what the target has already stays."""
    target.mkdir(mode=0o755, exist_ok=True)
    for path in source.iterdir():
        if not os.path.lexists(target / path.name):
            path.rename(target / path.name)
