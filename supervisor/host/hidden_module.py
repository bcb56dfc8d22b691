"""Imports of optional packages that another package would make, and this program has no use for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports of a package fail as if it were not installed; one that is loaded stays.

    Source: Python's reference, 5.3.1: `None` in `sys.modules` raises ModuleNotFoundError.
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # documented, and not in typeshed
    try:
        yield
    finally:
        del sys.modules[name]
