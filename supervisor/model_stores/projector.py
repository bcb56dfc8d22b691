"""Finds the projector (`mmproj`) that lies beside a model: pictures or sound become tokens by it.

It is taken only if it was made for a model of this width, and its name leaves no doubt: it is
called like the model, or has no name of its own and the directory has one model, in any number of
quantisations. Another model's projector of the same width would answer nonsense.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import ModelInvalid
from supervisor.gguf import metadata
from supervisor.gguf.metadata import Gguf
from supervisor.hub.file_names import FileGroup, FileKind, FileName, companion, group, parse

_FILES_MAX: Final = 256
_NO_NAME: Final = frozenset({"", "model"})


@dataclass(frozen=True, slots=True)
class Projector:
    """The projector of a model, with its size; or sentences on files that are none."""

    path: Path | None = None
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()


def beside(model: Gguf, cache_dir: Path) -> Projector:
    """Choose the projector beside a model. Reads the directory, and headers or cached metadata."""
    own = parse(model.path.name)
    if own is None or own.kind is not FileKind.MODEL:
        return Projector()
    skipped: list[str] = []
    for directory in _directories(model.path):
        groups = group(_names(directory))
        named = [one for one in groups if _is_named_for(one.first, own, groups)]
        fitting = [
            one for one in named if _fits(directory / one.first.path, model, cache_dir, skipped)
        ]
        if chosen := companion(fitting, own, FileKind.PROJECTOR):
            path = directory / chosen.first.path
            return Projector(path, path.stat().st_size, tuple(skipped))
    return Projector(skipped=tuple(skipped))


def _directories(path: Path) -> Iterator[Path]:
    yield path.parent
    # Repositories have their shards in a directory for each quantisation, the projector above it.
    above = parse(f"{path.parent.name}.gguf")
    if above and above.quantisation and not _base(above):
        yield path.parent.parent


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())[:_FILES_MAX]
    except OSError:
        return []


def _is_named_for(file: FileName, model: FileName, groups: Sequence[FileGroup]) -> bool:
    if file.kind is not FileKind.PROJECTOR:
        return False
    name, own = _base(file), _base(model)
    if name not in _NO_NAME:
        return name.startswith(own) or own.startswith(name)
    models = {_base(one.first) for one in groups if one.first.kind is FileKind.MODEL}
    return models <= {own}


def _base(file: FileName) -> str:
    """A name without `mmproj`, quantisation and separators."""
    name = re.sub(re.escape(file.quantisation or "\0"), "", _stem(file), flags=re.IGNORECASE)
    name = re.sub(r"mmproj|(?<![a-z])ud(?![a-z])", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _fits(path: Path, model: Gguf, cache_dir: Path, skipped: list[str]) -> bool:
    try:
        found = metadata.read(path, cache_dir=cache_dir)
    except ModelInvalid as error:
        skipped.append(f"not a projector for {model.path.name}: {error.message}")
        return False
    return found.kind == "projector" and found.projection_width == model.embedding_length


def _stem(file: FileName) -> str:
    return Path(file.prefix).name
