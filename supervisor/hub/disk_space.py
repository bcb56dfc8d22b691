"""Whether a download fits on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from supervisor.errors import DiskFull
from supervisor.output import size


def check(directory: Path, wanted_bytes: int) -> None:
    """Raise DiskFull if a directory, which need not exist yet, has less space."""
    there = next(one for one in (directory, *directory.parents) if one.exists())
    free_bytes = shutil.disk_usage(there).free
    if wanted_bytes > free_bytes:
        raise DiskFull(
            f"{size(wanted_bytes)} are to come, but {there} has {size(free_bytes)} free",
            hint="free some space, choose a smaller quantisation, or set another directory: "
            "HF_HOME for models of the hub, CORRAL_DATA_DIR for others",
        )
