"""Finds files inside installed Python packages, without importing these."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def find_inside(module: str, name: str) -> Path | None:
    """Return a file of an installed top-level module, or None when either is missing."""
    spec = importlib.util.find_spec(module)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / name
        if path.is_file():
            return path
    return None
