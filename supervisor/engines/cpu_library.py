"""Substitutes a portable CPU library for an engine's own, if the processor needs it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.engines.pins import EnginePin, PortablePin, find_inside, sha256_of
from supervisor.errors import AccessDenied
from supervisor.host.paths import make_ours, make_private

# A prebuilt engine may be compiled for a newer processor, and dies of an illegal instruction at its
# first token. Only the CPU backend has to be replaced, by another build of the same ABI: it gets a
# directory of its own, first on the library path.

# Set to `portable` in the environment, it has the portable library used on every processor.
CPU_LIBRARY_ENV: Final = "CORRAL_CPU_LIBRARY"

FindInside = Callable[[str, str], Path | None]


@dataclass(frozen=True, slots=True)
class CpuLibraryOverride:
    """Directories to go first on an engine's library path, with a note or a warning."""

    library_dirs: tuple[Path, ...] = ()  # empty if nothing is replaced
    note: str | None = None  # what was done, or None
    warning: str | None = None  # why the engine will not work, and the fix; None if it will


def cpu_library_for(
    pin: EnginePin,
    cpu_flags: frozenset[str],
    cache_dir: Path,
    find: FindInside = find_inside,
    *,
    is_portable: bool = False,
) -> CpuLibraryOverride:
    """The substitute that an engine needs on this processor, created if necessary.

    Without known `cpu_flags` nothing is done. With `is_portable` every processor needs it.
    """
    lacking = pin.cpu_flags - cpu_flags
    if not (cpu_flags and (lacking or (is_portable and pin.portable))):
        return CpuLibraryOverride()
    lack = problem = f"{CPU_LIBRARY_ENV} is portable"
    if lacking:
        lack = f"this CPU lacks {', '.join(sorted(lacking))}"
        problem = f"{lack}, which {pin.name} was compiled for"
        problem += ": it would be killed by an illegal instruction"
    if not pin.portable or pin.portable.cpu_flags - cpu_flags:
        return CpuLibraryOverride(
            warning=f"{problem}; set engine to a llama-server built for this machine"
        )
    library = find(pin.portable.module, pin.portable.library)
    if not library or sha256_of(library) != pin.portable.sha256:
        return CpuLibraryOverride(warning=f"{problem}; pip install {pin.portable.package}")
    try:
        make_ours(cache_dir)
        directory = _provide(library, pin.portable, make_private(cache_dir / "libraries"))
    except (OSError, AccessDenied) as error:
        return CpuLibraryOverride(
            warning=f"{problem}; cannot copy the portable library to {cache_dir}: {error}"
        )
    return CpuLibraryOverride(
        (directory,), note=f"{lack}; using the portable CPU library of {pin.portable.package}"
    )


def _provide(library: Path, pin: PortablePin, directory: Path) -> Path:
    """A directory that holds only a copy of the library, under its own name.

    The engine loads it as code, so the copy is verified by its hash, in a directory with mode 0700.
    """
    target_dir = make_private(directory / pin.sha256[:16])
    target = target_dir / library.name
    if _has_digest(target, pin.sha256):
        return target_dir
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        shutil.copyfile(library, Path(scratch, library.name)).replace(target)
    return target_dir


def _has_digest(path: Path, sha256: str) -> bool:
    try:
        return not path.is_symlink() and sha256_of(path) == sha256
    except OSError:
        return False
