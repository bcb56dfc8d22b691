"""Slot files that must not be given to an engine, kept for inspection within bounds.

A file that changed by itself hints at a failing disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from supervisor.host.paths import make_private

_FILES_MAX: Final = 16
_SIZE_MAX_BYTES: Final = 1024**3
_AGE_MAX: Final = timedelta(days=3)


@dataclass(frozen=True, slots=True)
class QuarantinedFile:
    """A file that was moved into quarantine, and why, as a clause."""

    model: str
    name: str
    reason: str


class Quarantine:
    """A directory of invalid files, made with mode 0700 when first needed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def take(self, *paths: Path) -> None:
        """Move those of the files here that exist."""
        make_private(self._root.parent)
        make_private(self._root)
        for path in paths:
            if path.exists():
                path.replace(self._root / path.name)
        self.bound()

    def names(self) -> list[str]:
        return sorted(path.name for path in self._files())

    def bound(self) -> None:
        """Delete the oldest files beyond 16 files and 1 GiB, and all beyond 3 days."""
        oldest_at = (datetime.now(tz=UTC) - _AGE_MAX).timestamp()
        left_bytes = _SIZE_MAX_BYTES
        newest_first = sorted(self._files(), key=lambda path: -path.lstat().st_ctime)
        for rank, path in enumerate(newest_first):
            found = path.lstat()
            left_bytes -= found.st_size
            if rank >= _FILES_MAX or left_bytes < 0 or found.st_ctime < oldest_at:
                path.unlink(missing_ok=True)

    def empty(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def _files(self) -> Iterable[Path]:
        return self._root.iterdir() if self._root.is_dir() else ()
