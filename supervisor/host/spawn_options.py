"""What a program needs on each system to be spawned: its library path, and flags. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

LIBRARY_PATHS: Final = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
# Source: Windows, Process Creation Flags.
_CREATE_NO_WINDOW: Final = 0x08000000


def library_path(
    environ: Mapping[str, str],
    program: Path,
    library_dirs: Iterable[Path],
    platform: str = sys.platform,
) -> dict[str, str]:
    """Return the variable with these directories before those that are there; {} if there are none.

    macOS looks for libraries of a program without a run path only where its variable says, so the
    program's own directory is one of them. Source: dyld(1).
    """
    is_mac = platform == "darwin"
    name = "DYLD_LIBRARY_PATH" if is_mac else "LD_LIBRARY_PATH"
    first = [*library_dirs, program.parent] if is_mac else [*library_dirs]
    parts = [*map(str, first), *filter(None, [environ.get(name)])]
    return {name: ":".join(parts)} if parts else {}


def creation_flags(platform: str = sys.platform) -> int:
    """Return `creationflags` of subprocess: on Windows, the program gets no console window."""
    return _CREATE_NO_WINDOW if platform == "win32" else 0
