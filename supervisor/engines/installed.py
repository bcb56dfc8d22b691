"""llama.cpp builds that `corral engine install` put under the data directory, by name.

    engines/b10434-vulkan/engine.json     what it is
    engines/b10434-vulkan/files/          what its release contains
    engines/in_use.json                   the build in use, and those before it

A directory gets its name when the build in it has run. Other directories begin with a dot.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from supervisor.errors import EngineBroken, EngineMissing
from supervisor.host.files import open_regular, write_atomic
from supervisor.host.paths import problem

# What names an engine: the path of a binary, or the name of an installed build.
EngineSetting = Path | str

_NAME: Final = re.compile(r"b(\d{1,9})(?:-[a-z0-9.]{1,24}){0,3}")
_DESCRIPTION: Final = "engine.json"
_DESCRIPTION_MAX_BYTES: Final = 1 << 16
_FILES: Final = "files"
_WRITABLE_BY_OTHERS: Final = 0o022
_INSTALL: Final = "corral engine install fetches one, corral engine list shows those here"


@dataclass(frozen=True, slots=True)
class InstalledBuild:
    """An installed build.

    Attributes:
        name: Its build and variant, such as `b10434-vulkan`.
        build: llama.cpp's build number, which its release is named after.
        variant: What it computes on, such as `cpu` or `cuda-13.4`.
        binary: The path of `llama-server` or `llama` below its files.
        archives: The SHA-256 of each archive of the release that it was extracted from, by name.
        installed_at: A date and time in ISO 8601.
    """

    name: str
    build: int
    variant: str
    binary: str
    archives: Mapping[str, str]
    installed_at: str

    def path(self, engines_dir: Path) -> Path:
        """Return the binary."""
        return files_of(engines_dir / self.name) / PurePosixPath(self.binary)


def is_build_name(text: str) -> bool:
    """Return whether a text has the form of a name, whole or without its variant."""
    return _NAME.fullmatch(text) is not None


def build_number(name: str) -> int:
    """Return the build number in a name; 0 without one."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def files_of(directory: Path) -> Path:
    """Return where the files of a build are, in the directory of that build."""
    return directory / _FILES


def installed_builds(engines_dir: Path) -> tuple[InstalledBuild, ...]:
    """Return all installed builds, the newest first.

    Raises:
        EngineBroken: Other users can write in the directory.
    """
    if not engines_dir.is_dir():
        return ()
    check_safe(engines_dir)
    found = (read_build(path) for path in engines_dir.iterdir() if is_build_name(path.name))
    return tuple(sorted(filter(None, found), key=lambda one: (-one.build, one.variant)))


def find_build(name: str, engines_dir: Path) -> InstalledBuild:
    """Return the build of a name; the variant may be left out where it is the only one.

    Raises:
        EngineMissing: None is installed under this name, or several are.
        EngineBroken: As `installed_builds`.
    """
    builds = installed_builds(engines_dir)
    exact = [one for one in builds if one.name == name]
    found = exact or [one for one in builds if one.name.startswith(f"{name}-")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(one.name for one in found or builds)
    if found:
        raise EngineMissing(f"{name} is installed as {names}", hint="name one of them")
    known = f"installed: {names}; {_INSTALL}" if names else _INSTALL
    raise EngineMissing(f"no llama.cpp build {name} is installed", hint=known)


def read_build(directory: Path) -> InstalledBuild | None:
    """Return the build in a directory; None where it has no valid description."""
    try:
        with open_regular(directory / _DESCRIPTION) as file:
            found = InstalledBuild(**json.loads(file.read(_DESCRIPTION_MAX_BYTES)))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return found if _is_valid(found) and found.name == directory.name else None


def write_build(directory: Path, build: InstalledBuild) -> None:
    """Describe the build in a directory.

    Raises:
        OSError: The directory cannot be written.
    """
    write_atomic(directory / _DESCRIPTION, json.dumps(asdict(build), indent=2))


def check_safe(engines_dir: Path) -> None:
    """Raise EngineBroken where others can write in the directory: programs are run from it."""
    found = engines_dir.stat()
    owner = found.st_uid or os.geteuid()  # root may put builds there for all
    if text := problem(found.st_mode, owner, os.geteuid(), _WRITABLE_BY_OTHERS):
        mode = stat.S_IMODE(found.st_mode) & ~_WRITABLE_BY_OTHERS
        raise EngineBroken(
            f"no engine is run from {engines_dir}: it {text}", hint=f"chmod {mode:o} {engines_dir}"
        )


def _is_valid(found: Any) -> bool:
    """Check what was read; the names in it become paths."""
    texts = (found.name, found.variant, found.binary, found.installed_at)
    if not (all(isinstance(one, str) for one in texts) and isinstance(found.build, int)):
        return False
    path = PurePosixPath(found.binary)
    return not path.is_absolute() and ".." not in path.parts and isinstance(found.archives, dict)
