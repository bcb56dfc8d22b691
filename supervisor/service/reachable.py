"""Which files another user cannot reach."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from pathlib import Path


def unreachable(paths: Iterable[Path]) -> Iterator[str]:
    """Yield what keeps a user without special rights from reading each path, once.

    Groups and access lists may still allow it.
    """
    seen = dict.fromkeys(reason for path in paths if (reason := _obstacle(path)))
    yield from seen


def _obstacle(path: Path) -> str | None:
    for parent in reversed(path.parents):
        if (mode := _mode(parent)) is not None and not mode & stat.S_IXOTH:
            return f"others cannot enter {parent} (mode {stat.S_IMODE(mode):o})"
    mode = _mode(path)
    if mode is None:
        return f"{path} is not there"
    return None if mode & stat.S_IROTH else f"others cannot read {path} (mode {mode & 0o777:o})"


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None
