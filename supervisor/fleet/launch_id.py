"""The identity of a replica, and of what its command line is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from supervisor.engines.help import FlagValue
from supervisor.flags.batching import BatchingSettings


@dataclass(frozen=True, slots=True, order=True)
class ReplicaId:
    """One replica of a model, numbered from 0, whichever instance serves it."""

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}.{self.number}"


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A version of a file; its size and time are None if there is no file."""

    path: Path
    size_bytes: int | None = None
    mtime_ns: int | None = None

    @classmethod
    def of(cls, path: Path) -> Self:
        try:
            found = path.stat()
        except (OSError, ValueError):  # missing, or not a path
            return cls(path)
        return cls(path, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class LaunchFingerprint:
    """What the command line of an instance is made from, apart from the machine."""

    engine: FileVersion
    library_dirs: tuple[Path, ...]
    model: FileVersion
    draft: FileVersion | None
    flags: Mapping[str, FlagValue]
    args: tuple[str, ...]
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    workers: tuple[str, ...] = ()
    projector: FileVersion | None = None  # found beside the model
    adapters: tuple[FileVersion, ...] = ()
    spool: Path | None = None  # where it writes slot files, unless that is beside them
