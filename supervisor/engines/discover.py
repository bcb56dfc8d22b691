"""Reads llama-server binaries, and llama.cpp's unified program `llama`, which contains one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from supervisor.engines import help as flags_help
from supervisor.engines import probe as probes
from supervisor.engines.cpu_library import CpuLibraryOverride, cpu_library_for
from supervisor.engines.help import Flags
from supervisor.engines.installed import (
    EngineSetting,
    InstalledBuild,
    find_build,
    installed_builds,
)
from supervisor.engines.pins import EnginePin, engine_pins, sha256_of
from supervisor.engines.probe import probe
from supervisor.engines.search import Candidate, SearchPaths, Source, candidate_of, find, here
from supervisor.errors import EngineBroken, EngineMissing
from supervisor.host import json_cache
from supervisor.host.files import NotRegular, stat_regular

# A busy machine with many devices takes seconds to list them; none takes this long.
_LIMIT_S: Final = 20.0
_MIB: Final = 1024**2
_INSTALL: Final = "corral engine install fetches one; or set engine to the path of a llama-server"
# `version: 6123 (abc1234)` until b10393, `version: 0.1.0-dev (build 6123, commit abc1234)` since.
_BUILD: Final = re.compile(r"(?:version: |build )(\d+)[ ,]")
_BUILD_TRUSTED: Final = 1000
_DEVICE: Final = re.compile(r"\s+(\S+): (.+?)(?: \((\d+) MiB, (\d+) MiB free\))?")


@dataclass(frozen=True, slots=True)
class Device:
    """A device that layers can be offloaded to."""

    name: str  # as `--device` takes it, such as `Vulkan0`
    description: str
    total_mib: int  # 0 if it has no memory of its own
    worker: str | None = None  # the RPC worker that offers it; None for a device of this machine
    is_main_memory: bool = False  # whether its memory is this machine's main memory
    # Free when it was listed just now, whoever uses the rest; None if not listed, or not said.
    free_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """A llama-server of one build."""

    path: Path  # the binary, absolute
    version: str  # the line it prints
    build: int | None  # llama.cpp's build number; None if the printed one is not reliable
    source: Source
    library_dirs: tuple[Path, ...]  # to go first on its library path
    # As `--list-devices` prints them; empty on a machine with a CPU only.
    devices: tuple[Device, ...]
    flags: Flags = field(repr=False)
    note: str | None = None  # what was done to make it run here, or None
    warning: str | None = None  # why it will not work here, and the fix; None if it will
    subcommand: str = ""  # `serve`, or nothing if the program is llama-server itself
    name: str | None = None  # of an installed build

    @property
    def command(self) -> tuple[str, ...]:
        """The words before its options."""
        return (str(self.path), *filter(None, [self.subcommand]))


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """A candidate, with the engine, or the error if it is broken."""

    candidate: Candidate
    engine: Engine | None
    error: EngineBroken | EngineMissing | None


def load(
    setting: EngineSetting | None, *, cache_dir: Path, places: SearchPaths | None = None
) -> Engine:
    """The engine to use.

    Raises:
        EngineMissing: Not found, or not where the setting says.
        EngineBroken: The first one found does not run, or differs from its pin.
    """
    places = places or here()
    first = next(find(setting, places), None)
    if first is None:
        raise EngineMissing("no llama-server found", hint=_INSTALL)
    return _load(first, cache_dir, places)


def list_devices(engine: Engine, limit_s: float = _LIMIT_S) -> tuple[Device, ...]:
    """The engine's devices with what is free of them now; blocks, and raises EngineBroken."""
    return tuple(read_devices(probes.list_devices(engine.command, engine.library_dirs, limit_s)))


def free_bytes(devices: Iterable[Device]) -> Mapping[str, int]:
    """The free bytes of those that were listed with them, by name."""
    return {one.name: one.free_mib * _MIB for one in devices if one.free_mib is not None}


def list_engines(
    setting: EngineSetting | None, *, cache_dir: Path, places: SearchPaths | None = None
) -> tuple[FoundEngine, ...]:
    """All engines found, the one to use first, with those that do not run.

    Raises:
        EngineBroken: Other users can write where builds are installed.
    """
    places = places or here()
    found = [_probed(one, cache_dir, places) for one in find(setting, places)]
    listed = {one.engine.name for one in found if one.engine}
    others = installed_builds(places.engines) if places.engines else ()
    more = [candidate_of(one.name, "installed", places) for one in others if one.name not in listed]
    return (*found, *(_probed(one, cache_dir, places) for one in more))


def _probed(candidate: Candidate, cache_dir: Path, places: SearchPaths) -> FoundEngine:
    try:
        return FoundEngine(candidate, _load(candidate, cache_dir, places), None)
    except (EngineBroken, EngineMissing) as error:
        return FoundEngine(candidate, None, error)


def _load(candidate: Candidate, cache_dir: Path, places: SearchPaths) -> Engine:
    installed = _installed(candidate, places)
    path = installed.path(candidate.path.parent) if installed else candidate.path
    pin = _pin(path, candidate.source, places.vendor, cache_dir)
    override = (
        cpu_library_for(
            pin, places.cpu_flags, cache_dir, places.find, is_portable=places.is_cpu_portable
        )
        if pin
        else CpuLibraryOverride()
    )
    output = probe(path, override.library_dirs, cache_dir=cache_dir, limit_s=_LIMIT_S)
    version = next((line for line in output.version.splitlines() if "version" in line), "unknown")
    return Engine(
        path=path,
        version=version.removeprefix("version: ").strip(),
        build=pin.build if pin else _build(output.version, installed),
        source=candidate.source,
        library_dirs=override.library_dirs,
        devices=tuple(replace(one, free_mib=None) for one in read_devices(output.devices)),
        flags=flags_help.parse(output.help),
        note=override.note,
        warning=override.warning,
        subcommand=output.subcommand,
        name=installed.name if installed else None,
    )


def _installed(candidate: Candidate, places: SearchPaths) -> InstalledBuild | None:
    """The installed build that a candidate names; raises as `find_build`."""
    if candidate.name is None:
        return None
    if places.engines is None:
        raise EngineMissing(f"no llama.cpp build {candidate.name} is installed", hint=_INSTALL)
    return find_build(candidate.name, places.engines)


def _pin(path: Path, source: Source, vendor: Path, cache_dir: Path) -> EnginePin | None:
    """The pin of a binary, recognised by its hash."""
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
    """SHA-256 of a binary, cached: one with its GPU code inside may have a gigabyte."""
    key = json_cache.key_of([path], "sha256")
    cached = json_cache.get(cache_dir / "engines", key)
    if cached and isinstance(cached.get("sha256"), str):
        return str(cached["sha256"])
    digest = sha256_of(path)
    json_cache.put(cache_dir / "engines", key, {"sha256": digest})
    return digest


def _build(version: str, installed: InstalledBuild | None) -> int | None:
    found = _BUILD.search(version)
    # Packages built without git print 0 or 1.
    if found and int(found.group(1)) >= _BUILD_TRUSTED:
        return int(found.group(1))
    return installed.build if installed else None


def read_devices(text: str) -> Iterator[Device]:
    """Read the devices of a build from its `--list-devices`."""
    for line in text.splitlines():
        if found := _DEVICE.fullmatch(line):
            name, description, total, free = found.groups()
            yield Device(name, description, int(total or 0), free_mib=int(free) if free else None)
