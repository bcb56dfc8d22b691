"""This machine, and the versions of what runs on it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from supervisor import __version__
from supervisor.host import machine
from supervisor.host.cpu_name import cpu_name
from supervisor.host.paths import Directories

_DISTRIBUTION: Final = "llama-corral"


def machine_facts(where: Directories) -> dict[str, Any]:
    here = asdict(machine.read())
    here["cpu_flags"] = sorted(here["cpu_flags"])
    return {
        "system": platform.platform(),
        "distribution": _distribution(),
        "processor": cpu_name(),
        **here,
        "load_average": os.getloadavg(),
        "directories": {name: _directory(path) for name, path in asdict(where).items()},
    }


def versions() -> dict[str, str]:
    return {
        "llama-corral": __version__,
        "python": sys.version,
        **dict(sorted(_dependencies())),
    }


def _dependencies() -> Iterator[tuple[str, str]]:
    for line in metadata.requires(_DISTRIBUTION) or ():
        name = line.partition(";")[0].rstrip("0123456789.<>=!~, ")
        if "extra ==" not in line:
            try:
                yield name, metadata.version(name)
            except metadata.PackageNotFoundError:
                yield name, "missing"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _directory(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"path": str(path), "exists": False}
    return {"path": str(path), "mode": f"{path.stat().st_mode & 0o7777:o}", **_space(path)}


def _space(path: Path) -> dict[str, int]:
    used = shutil.disk_usage(path)
    return {"disk_free_bytes": used.free, "disk_bytes": used.total}
