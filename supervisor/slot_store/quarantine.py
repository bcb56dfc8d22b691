"""Slot files that must never be shown to an engine: moved aside, looked at by people, deleted.

They are kept because a file that changed by itself tells of a dying disk, and bounded because
nobody may ever look.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from supervisor.host.paths import make_private

_FILES_MAX: Final = 16
_SIZE_MAX_BYTES: Final = 1024**3
_AGE_MAX: Final = timedelta(days=3)


class Quarantine:
    """A directory of files that were found altered or foreign.

    Args:
        root: Made when first needed, 0700.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def take(self, *paths: Path) -> None:
        """Move files here, those of them that are there; then bound what is kept."""
        make_private(self._root.parent)
        make_private(self._root)
        for path in paths:
            if path.exists():
                path.replace(self._root / path.name)
        self.bound()

    def names(self) -> list[str]:
        """Return the names of the files that are here."""
        return sorted(path.name for path in self._files())

    def bound(self) -> None:
        """Delete the oldest files beyond the number and the bytes, and all beyond the age."""
        young_at = (datetime.now(tz=UTC) - _AGE_MAX).timestamp()
        left_bytes = _SIZE_MAX_BYTES
        newest_first = sorted(self._files(), key=lambda path: -path.lstat().st_ctime)
        for rank, path in enumerate(newest_first):
            found = path.lstat()
            left_bytes -= found.st_size
            if rank >= _FILES_MAX or left_bytes < 0 or found.st_ctime < young_at:
                path.unlink(missing_ok=True)

    def empty(self) -> None:
        """Delete everything."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _files(self) -> Iterable[Path]:
        return self._root.iterdir() if self._root.is_dir() else ()
