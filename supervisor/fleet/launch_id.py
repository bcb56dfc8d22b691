"""What identifies a replica, and what its command line is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from supervisor.engines.help import FlagValue


@dataclass(frozen=True, slots=True, order=True)
class ReplicaId:
    """One replica of a model, whichever instance holds it.

    Attributes:
        model: The model's name.
        number: Which replica, from 0.
    """

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}.{self.number}"


@dataclass(frozen=True, slots=True)
class FileVersion:
    """A file, told from another that took its path.

    Attributes:
        path: Where it is.
        size_bytes: Its size; None where there is no file.
        mtime_ns: When it was written; None where there is no file.
    """

    path: Path
    size_bytes: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class LaunchFingerprint:
    """What the command line of an instance is made from, the machine aside.

    Attributes:
        engine: The llama-server.
        library_dirs: What goes first on its library path.
        model: The GGUF, of a split one the first shard.
        draft: The GGUF it drafts with, or None.
        flags: The profile's flags under the model's own. By which of the two a flag was set makes
            no difference to what runs.
        args: Words passed as they are.
    """

    engine: FileVersion
    library_dirs: tuple[Path, ...]
    model: FileVersion
    draft: FileVersion | None
    flags: Mapping[str, FlagValue]
    args: tuple[str, ...]
