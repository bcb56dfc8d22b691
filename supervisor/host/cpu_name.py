"""The name of the processor, by which another machine is recognised."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_NAME_MAX: Final = 80


@functools.cache
def cpu_name() -> str:
    """Return the processor's name as Linux has it, or its architecture."""
    try:
        lines = _CPUINFO.read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2] for line in lines if line.startswith("model name"))
    name = " ".join(next(named, "").split())
    return (name or platform.machine() or "unknown processor")[:_NAME_MAX]
