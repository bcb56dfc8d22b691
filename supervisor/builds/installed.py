"""Manages the llama.cpp builds that `corral engine install` puts into the data directory.

    engines/b10434-vulkan/engine.json     the description of the build
    engines/b10434-vulkan/files/          the content of its release
    engines/in_use.json                   the build in use, and earlier ones

A directory gets the name of its build only after the build has run; until then its name begins
with a dot.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import filelock
from pydantic import AfterValidator, Field, TypeAdapter

from proxy.common.toml_types import ExpandedPath
from supervisor.errors import EngineBroken, EngineMissing, EnginesBusy
from supervisor.system.files import open_regular, translate_disk_errors, write_atomic
from supervisor.system.paths import directory_problem, make_ours


def _build_name(name: str) -> str:
    if not is_build_name(name):
        raise ValueError("not the name of a build, such as b10434 or b10434-vulkan")
    return name


BuildName = Annotated[str, AfterValidator(_build_name)]
EngineField = Annotated[BuildName | ExpandedPath, Field(union_mode="left_to_right")]


_FILE: Final = "in_use.json"
_FILE_MAX_BYTES: Final = 1 << 16
_PREVIOUS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class InUse:
    """The name of the build in use, and the names of earlier ones, the latest last.

    None stands for no installed build: the engine is then found elsewhere.
    """

    current: BuildName | None = None
    previous: tuple[BuildName | None, ...] = ()

    def use(self, name: str) -> InUse:
        """Return the state after a change to another build."""
        if name == self.current:
            return self
        return InUse(name, (*self.previous, self.current)[-_PREVIOUS_MAX:])

    def roll_back(self, installed: frozenset[str]) -> InUse | None:
        """Return the state with the latest earlier build that is still installed.

        If no build was in use, that counts as an earlier choice too. None if there is nothing to go
        back to.
        """
        for count in range(len(self.previous), 0, -1):
            name = self.previous[count - 1]
            if name != self.current and (name is None or name in installed):
                return InUse(name, self.previous[: count - 1])
        return None


def read_in_use(engines_dir: Path) -> InUse:
    """Return the build in use; an empty state if the file is missing or invalid."""
    try:
        with open_regular(engines_dir / _FILE) as file:
            return TypeAdapter(InUse).validate_json(file.read(_FILE_MAX_BYTES))
    except (OSError, ValueError):
        return InUse()


def write_in_use(engines_dir: Path, in_use: InUse) -> None:
    """Write the build in use; raises OSError if the directory cannot be written."""
    write_atomic(engines_dir / _FILE, json.dumps(asdict(in_use)))


# The path of a binary, or the name of an installed build.
EngineSetting = Path | str

_NAME: Final = re.compile(r"b(\d{1,9})(?:-[a-z0-9.]{1,24}){0,3}")
_DESCRIPTION: Final = "engine.json"
_DESCRIPTION_MAX_BYTES: Final = 1 << 16
_FILES: Final = "files"
_WRITABLE_BY_OTHERS: Final = 0o022
_INSTALL: Final = "corral engine install fetches one, corral engine list shows those here"


@dataclass(frozen=True, slots=True)
class InstalledBuild:
    name: str  # its build and variant, such as `b10434-vulkan`
    build: int  # llama.cpp's build number, from the name of the release
    variant: str  # the hardware that it computes on, such as `cpu` or `cuda-13.4`
    binary: str  # the path of `llama-server` or `llama` below its files
    archives: Mapping[str, str]  # the SHA-256 of each archive that it was extracted from, by name
    installed_at: str  # a date and time in ISO 8601

    def path(self, engines_dir: Path) -> Path:
        return files_of(engines_dir / self.name) / PurePosixPath(self.binary)


def is_build_name(text: str) -> bool:
    """Return whether a text has the form of a build's name, with or without a variant."""
    return _NAME.fullmatch(text) is not None


def engine_setting(text: str) -> EngineSetting:
    """Return the name of an installed build, or a path."""
    return text if is_build_name(text) else Path(text)


def files_of(directory: Path) -> Path:
    return directory / _FILES


def installed_builds(engines_dir: Path) -> tuple[InstalledBuild, ...]:
    """Return all builds, newest first; raises EngineBroken if other users can write there."""
    if not engines_dir.is_dir():
        return ()
    check_safe(engines_dir)
    found = (read_build(path) for path in engines_dir.iterdir() if is_build_name(path.name))
    return tuple(sorted(filter(None, found), key=lambda build: (-build.build, build.variant)))


def find_build(name: str, engines_dir: Path) -> InstalledBuild:
    """Find a build by its name, which may lack the variant if only one is installed.

    Raises EngineMissing if none or several have this name, or as `installed_builds`.
    """
    builds = installed_builds(engines_dir)
    exact = [build for build in builds if build.name == name]
    found = exact or [build for build in builds if build.name.startswith(f"{name}-")]
    if len(found) == 1:
        return found[0]
    names = ", ".join(build.name for build in found or builds)
    if found:
        raise EngineMissing(f"{name} is installed as {names}", hint="name one of them")
    known = f"installed: {names}; {_INSTALL}" if names else _INSTALL
    raise EngineMissing(f"no llama.cpp build {name} is installed", hint=known)


def read_build(directory: Path) -> InstalledBuild | None:
    """Return the build in a directory; None if it has no valid description."""
    try:
        with open_regular(directory / _DESCRIPTION) as file:
            content = file.read(_DESCRIPTION_MAX_BYTES)
        found = TypeAdapter(InstalledBuild).validate_json(content, strict=True)
    except (OSError, ValueError):
        return None
    binary = PurePosixPath(found.binary)  # it becomes a path
    is_inside = not binary.is_absolute() and ".." not in binary.parts
    return found if is_inside and found.name == directory.name else None


def write_build(directory: Path, build: InstalledBuild) -> None:
    """Write the description of a build; raises OSError if the directory cannot be written."""
    write_atomic(directory / _DESCRIPTION, json.dumps(asdict(build), indent=2))


def check_safe(engines_dir: Path) -> None:
    """Raise EngineBroken if others can write in the directory, whose programs are run."""
    found = engines_dir.stat()
    owner = found.st_uid or os.geteuid()  # root may install builds for all users
    if text := directory_problem(found.st_mode, owner, os.geteuid(), _WRITABLE_BY_OTHERS):
        mode = stat.S_IMODE(found.st_mode) & ~_WRITABLE_BY_OTHERS
        raise EngineBroken(
            f"no engine is run from {engines_dir}: it {text}", hint=f"chmod {mode:o} {engines_dir}"
        )


_LOCK: Final = ".lock"
REMOVED: Final = ".removed"


@contextmanager
def lock_builds(engines_dir: Path) -> Iterator[None]:
    """Hold the lock of the directory of builds, which is created if needed.

    Raises EnginesBusy if another command holds it, or AccessDenied or DiskFull.
    """
    make_ours(engines_dir.parent)
    make_ours(engines_dir)
    with translate_disk_errors(engines_dir, "CORRAL_DATA_DIR"):
        try:
            with filelock.FileLock(engines_dir / _LOCK, timeout=0, mode=0o600):
                yield
        except filelock.Timeout as error:
            raise EnginesBusy(
                "another corral engine command changes the installed builds",
                hint="run this one again when that is over",
            ) from error


def use_build(name: str, engines_dir: Path) -> InUse:
    """Use an installed build; the caller holds the lock."""
    in_use = read_in_use(engines_dir).use(name)
    write_in_use(engines_dir, in_use)
    return in_use


def roll_back(engines_dir: Path) -> InUse:
    """Use the previous build again, or raise EngineMissing; the caller holds the lock."""
    names = frozenset(build.name for build in installed_builds(engines_dir))
    in_use = read_in_use(engines_dir).roll_back(names)
    if in_use is None:
        raise EngineMissing(
            "no other build was in use before",
            hint="corral engine list shows the installed builds, corral engine use BUILD uses one",
        )
    write_in_use(engines_dir, in_use)
    return in_use


def remove_build(build: InstalledBuild, engines_dir: Path) -> None:
    """Remove the files of a build; the caller holds the lock.

    The directory is renamed first, so that a half-deleted build is never used.
    """
    aside = engines_dir / f"{REMOVED}-{build.name}"
    shutil.rmtree(aside, ignore_errors=True)
    (engines_dir / build.name).rename(aside)
    shutil.rmtree(aside)
