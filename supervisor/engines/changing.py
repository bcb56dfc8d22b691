"""Changes of the installed builds, one command at a time."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import filelock

from supervisor.engines.in_use import InUse, read_in_use, write_in_use
from supervisor.engines.installed import InstalledBuild, installed_builds
from supervisor.errors import AccessDenied, CorralError, DiskFull, EngineMissing, EnginesBusy
from supervisor.host.paths import make_ours

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOCK: Final = ".lock"
REMOVED: Final = ".removed"


@contextmanager
def changing(engines_dir: Path) -> Iterator[None]:
    """Hold the directory of builds during the block; created if needed.

    Raises:
        EnginesBusy: Another command holds it.
        AccessDenied, DiskFull: It cannot be written.
    """
    make_ours(engines_dir.parent)
    make_ours(engines_dir)
    try:
        with filelock.FileLock(engines_dir / _LOCK, timeout=0, mode=0o600):
            yield
    except filelock.Timeout as error:
        raise EnginesBusy(
            "another corral engine command changes the installed builds",
            hint="run this one again when that is over",
        ) from error
    except OSError as error:
        raise _unwritable(engines_dir, error) from error


def _unwritable(engines_dir: Path, error: OSError) -> CorralError:
    if error.errno in _NO_SPACE:
        return DiskFull(
            f"no space is left in {engines_dir}",
            hint="free some, then run the same command again; what was downloaded is kept",
        )
    return AccessDenied(
        f"cannot write in {engines_dir}: {error.strerror or error}",
        hint="make it writable, or set CORRAL_DATA_DIR to another directory",
    )


def use_build(name: str, engines_dir: Path) -> InUse:
    """Use an installed build; the caller holds the directory."""
    in_use = read_in_use(engines_dir).using(name)
    write_in_use(engines_dir, in_use)
    return in_use


def roll_back(engines_dir: Path) -> InUse:
    """Use the build before the one in use; the caller holds the directory.

    Raises:
        EngineMissing: There is none.
    """
    names = frozenset(one.name for one in installed_builds(engines_dir))
    in_use = read_in_use(engines_dir).rolled_back(names)
    if in_use is None:
        raise EngineMissing(
            "no other build was in use before",
            hint="corral engine list shows what is installed, corral engine use BUILD uses one",
        )
    write_in_use(engines_dir, in_use)
    return in_use


def remove_build(build: InstalledBuild, engines_dir: Path) -> None:
    """Remove the files of a build; the caller holds the directory.

    It loses its name first, so that half of it is never taken for a build.
    """
    aside = engines_dir / f"{REMOVED}-{build.name}"
    shutil.rmtree(aside, ignore_errors=True)
    (engines_dir / build.name).rename(aside)
    shutil.rmtree(aside)
