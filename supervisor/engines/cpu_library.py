"""Puts a portable CPU library before an engine's own, where the processor needs it.

A prebuilt engine may have been compiled for a newer processor than this one, and dies of an illegal
instruction at its first token. Its other libraries are fine; only the CPU backend has to be another
build of the same ABI. That one file gets a directory of its own, which goes first on the library
path.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from supervisor.engines.pins import EnginePin, PortablePin, find_inside, sha256_of
from supervisor.errors import AccessDenied
from supervisor.host.paths import make_ours, make_private

FindInside = Callable[[str, str], Path | None]


@dataclass(frozen=True, slots=True)
class CpuLibraryOverride:
    """What stands in for an engine's own libraries.

    Attributes:
        library_dirs: To go first on the library path; empty where nothing stands in.
        note: What was done, or None.
        warning: Why the engine will not work, and what to do; None where it will.
    """

    library_dirs: tuple[Path, ...] = ()
    note: str | None = None
    warning: str | None = None


def cpu_library_for(
    pin: EnginePin,
    cpu_flags: frozenset[str],
    cache_dir: Path,
    find: FindInside = find_inside,
) -> CpuLibraryOverride:
    """Return what an engine needs on this processor, and make it.

    Args:
        pin: The engine.
        cpu_flags: What the processor has; empty where that is not known, and nothing is done.
        cache_dir: Where the directory is made.
        find: Finds a file inside a Python module.
    """
    lacking = pin.cpu_flags - cpu_flags
    if not (lacking and cpu_flags):
        return CpuLibraryOverride()
    lack = f"this CPU lacks {', '.join(sorted(lacking))}"
    doomed = f"{lack}, which {pin.name} was compiled for: it would die of an illegal instruction"
    if not pin.portable or pin.portable.cpu_flags - cpu_flags:
        return CpuLibraryOverride(
            warning=f"{doomed}; set engine to a llama-server built for this machine"
        )
    library = find(pin.portable.module, pin.portable.library)
    if not library or sha256_of(library) != pin.portable.sha256:
        return CpuLibraryOverride(warning=f"{doomed}; pip install {pin.portable.package}")
    try:
        make_ours(cache_dir)
        directory = _provide(library, pin.portable, make_private(cache_dir / "libraries"))
    except (OSError, AccessDenied) as error:
        return CpuLibraryOverride(
            warning=f"{doomed}; its stand-in cannot be put into {cache_dir}: {error}"
        )
    return CpuLibraryOverride(
        (directory,), note=f"{lack}: the portable CPU library of {pin.portable.package}"
    )


def _provide(library: Path, pin: PortablePin, directory: Path) -> Path:
    """Return a directory that holds only a copy of the library, under its own name.

    The engine loads it as code: a copy counts by its digest, in a directory that is ours alone.
    """
    home = directory / pin.sha256[:16]
    there = home / library.name
    make_private(home)
    if _is(there, pin.sha256):
        return home
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        shutil.copyfile(library, Path(scratch, library.name)).replace(there)
    return home


def _is(path: Path, sha256: str) -> bool:
    """Return whether a file is there, is no link, and has this digest."""
    try:
        return not path.is_symlink() and sha256_of(path) == sha256
    except OSError:
        return False
