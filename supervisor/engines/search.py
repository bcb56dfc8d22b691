"""Where engines are searched. Runs none of them.

The order, of which the first is used: the setting, the installed build in use, `vendor/engines/` as
pinned by `vendor/engine.toml`, the installed PyPI wheel, PATH; there `llama-server` before `llama`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from supervisor.engines.cpu_library import CPU_LIBRARY_ENV, FindInside
from supervisor.engines.in_use import read_in_use
from supervisor.engines.installed import EngineSetting
from supervisor.engines.pins import engine_pins, find_inside
from supervisor.host.machine import cpu_flags
from supervisor.host.paths import shipped

Source = Literal["setting", "installed", "vendor", "package", "path"]

PROGRAMS: Final = ("llama-server", "llama")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path that should be an engine."""

    path: Path  # of an installed build, its directory
    source: Source
    name: str | None = None  # of an installed build


@dataclass(frozen=True, slots=True)
class SearchPaths:
    """Where to search.

    `vendor` holds `engine.toml` and `engines/`, `path` is like PATH; `engines` holds installed
    builds, None for none. With `is_cpu_portable`, pinned engines use the portable CPU library.
    """

    vendor: Path
    path: str
    cpu_flags: frozenset[str]
    find: FindInside = find_inside
    engines: Path | None = None
    is_cpu_portable: bool = False


def here(engines_dir: Path | None = None) -> SearchPaths:
    """Return where engines are on this machine, with the builds installed in a directory."""
    path = os.environ.get("PATH", os.defpath)
    is_portable = os.environ.get(CPU_LIBRARY_ENV) == "portable"
    return SearchPaths(
        shipped("vendor"), path, cpu_flags(), engines=engines_dir, is_cpu_portable=is_portable
    )


def find(setting: EngineSetting | None, places: SearchPaths | None = None) -> Iterator[Candidate]:
    """All candidates, the one to use first; runs none of them."""
    places = places or here()
    yield from _chosen(setting, places)
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


def _chosen(setting: EngineSetting | None, places: SearchPaths) -> Iterator[Candidate]:
    if isinstance(setting, Path):
        yield Candidate(setting.absolute(), "setting")
    elif setting is not None:
        yield candidate_of(setting, "setting", places)
    if places.engines and (current := read_in_use(places.engines).current):
        yield candidate_of(current, "installed", places)


def candidate_of(name: str, source: Source, places: SearchPaths) -> Candidate:
    return Candidate((places.engines or places.vendor) / name, source, name)
