"""Length limits of paths. Kept free of pydantic, which quick commands do not import."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

_PATH_MAX: Final = 4096
_NAME_MAX: Final = 255


def too_long(path: Path) -> bool:
    """Return whether a path or a part of it is too long for any system. Source: limits.h."""
    parts = [os.fsencode(part) for part in path.parts]
    return sum(map(len, parts)) >= _PATH_MAX or any(len(part) > _NAME_MAX for part in parts)
