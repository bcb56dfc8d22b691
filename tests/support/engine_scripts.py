"""Shell scripts that stand for an engine and run the real one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from supervisor.builds.probe import library_path


def library_exports(engine: Path, library_dirs: Sequence[Path]) -> str:
    """Return lines for such a script that put these directories on its library path.

    `Engine.library_dirs` are found by the hash of the binary, so a script has none. Without them,
    the packaged engine runs only on some processors.
    """
    variables = library_path(os.environ, engine, library_dirs)
    return "".join(f"export {name}='{value}'\n" for name, value in variables.items())
