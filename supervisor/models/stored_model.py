"""Describes stored models, walks through directories for them, and finds their projectors.

A projector (`mmproj`) turns pictures or sound into tokens. A projector beside a model is used only
if it fits the model's width and clearly belongs to it: it is named like the model, or it has a
generic name and the directory has a single model, in any number of quantisations. With another
model's projector of the same width, answers would be nonsense.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Final, Literal, get_args

from supervisor.errors import ModelInvalid
from supervisor.models import metadata
from supervisor.models.file_names import (
    FileGroup,
    FileName,
    clean,
    companion,
    group,
    parse_file_name,
)
from supervisor.models.metadata import Gguf
from supervisor.system.ownership import foreign_owner

_HIDDEN: Final = "."


def walk_files(
    root: Path,
    notes: list[str],
    *,
    max_entries: int = 50_000,
    max_depth: int = 8,
    max_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Path]:
    """Yield all files below a directory in order of name; visits each directory once.

    It ends early at a limit. `notes` gets a sentence for everything that it leaves out.
    """
    seen: set[tuple[int, int]] = set()
    entries, until_s = 0, clock() + max_s

    def walk(directory: Path, depth: int) -> Iterator[Path]:
        nonlocal entries
        for path in _entries(directory, seen, notes, max(0, max_entries - entries) + 1):
            entries += 1
            if entries > max_entries:
                _note(notes, f"{root}: the search ended after {max_entries:,} files")
                return
            if clock() > until_s:
                _note(notes, f"{root}: the search ended after {max_s:g} s")
                return
            if not os.path.isdir(path):  # noqa: PTH112 (Path.is_dir may raise)
                yield path
            elif depth < max_depth:
                yield from walk(path, depth + 1)
            else:
                _note(notes, f"{path} was not searched: more than {max_depth} levels deep")

    yield from walk(root, 0)


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def _entries(
    directory: Path, seen: set[tuple[int, int]], notes: list[str], most: int
) -> list[Path]:
    """Return the entries of a directory by name, without hidden ones; none if it was seen."""
    try:
        found = directory.stat()
        if (found.st_dev, found.st_ino) in seen:
            return []
        seen.add((found.st_dev, found.st_ino))
        with os.scandir(directory) as listed:
            names = [entry.name for entry in islice(listed, most)]
    except FileNotFoundError:
        return []
    except OSError as error:
        _note(notes, f"{directory} cannot be read: {error.strerror}")
        return []
    return [directory / name for name in sorted(names) if not name.startswith(_HIDDEN)]


_FILES_MAX: Final = 256


def find_projector(model: Gguf, cache_dir: Path) -> tuple[Path | None, list[str]]:
    """Choose the projector beside a model; reads its directory and the metadata of projectors.

    Also returns sentences about invalid files beside it.
    """
    own = parse_file_name(model.path.name)
    if own is None or own.kind != "model":
        return None, []
    skipped: list[str] = []
    for directory in _directories(model.path):
        groups = group(_names(directory))
        fitting = [
            found
            for found in groups
            if _is_named_for(found.first, own, groups)
            and _fits(directory / found.first.path, model, cache_dir, skipped)
        ]
        if chosen := companion(fitting, own, "projector"):
            return directory / chosen.first.path, skipped
    return None, skipped


def _directories(path: Path) -> Iterator[Path]:
    yield path.parent
    # A repository may have a directory of shards for each quantisation, and the projector above.
    above = parse_file_name(f"{path.parent.name}.gguf")
    if above and above.quantisation and not _base(above):
        yield path.parent.parent


def _names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir())[:_FILES_MAX]
    except OSError:
        return []


def _is_named_for(file: FileName, model: FileName, groups: Sequence[FileGroup]) -> bool:
    if file.kind != "projector":
        return False
    name, own = _base(file), _base(model)
    if name not in {"", "model"}:
        return name.startswith(own) or own.startswith(name)
    models = {_base(group.first) for group in groups if group.first.kind == "model"}
    return models <= {own}


def _base(file: FileName) -> str:
    """Return a name without `mmproj`, quantisation and separators."""
    name = re.sub(
        re.escape(file.quantisation or "\0"), "", Path(file.prefix).name, flags=re.IGNORECASE
    )
    name = re.sub(r"mmproj|(?<![a-z])ud(?![a-z])", "", name, flags=re.IGNORECASE)
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _fits(path: Path, model: Gguf, cache_dir: Path, skipped: list[str]) -> bool:
    try:
        found = metadata.read(path, cache_dir=cache_dir)
    except ModelInvalid as error:
        skipped.append(f"not a projector for {model.path.name}: {error.message}")
        return False
    return found.kind == "projector" and found.projection_width == model.embedding_length


Store = Literal["corral", "models_dir", "huggingface", "llama.cpp", "lmstudio", "ollama"]

# The order in which models get their names; the second of two equal names gets `@STORE`.
STORES: Final[tuple[Store, ...]] = get_args(Store)
_NAME_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in a store; until `open_model` has read its file, size, kind and so on are empty."""

    name: str  # The name for users, such as `qwen3:8b` or `ORG/REPO:QUANT`
    store: Store
    path: Path  # The GGUF file, or the first shard of a split model
    root: Path  # The directory of its store
    size_bytes: int = 0  # Disk space of all shards, without the projector
    kind: str = ""  # `chat`, `embedding` or `rerank`; empty with a problem
    quantisation: str = ""  # Such as `Q4_K_M`; empty with a problem
    projector: Path | None = None  # Its picture or sound encoder, or None
    adapters: tuple[Path, ...] = ()  # LoRA files that are part of it
    files: tuple[Path, ...] = ()  # All its shards
    problem: str | None = None  # Why it cannot be served, or None

    @property
    def id(self) -> str:
        return model_id(self.name)

    @property
    def flags(self) -> dict[str, str]:
        found = {"mmproj": str(self.projector)} if self.projector else {}
        return found | ({"lora": ",".join(map(str, self.adapters))} if self.adapters else {})


def model_id(name: str) -> str:
    """Make a name valid for `[models.NAME]`: without `/`, and at most 64 characters."""
    written = clean(name.replace("/", "--"))
    if written and len(written) <= _NAME_MAX:
        return written
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    kept = written[: _NAME_MAX - len(digest) - 1] or "model"
    return f"{kept}-{digest}"


def label(*parts: str) -> str:
    """Join the names of files and directories to a name that clients can send."""
    return "/".join(filter(None, map(clean, parts)))[:128] or "model"


# Other programs and users may own these stores; this user named the others.
_SHARED: Final = frozenset({"huggingface", "llama.cpp", "lmstudio", "ollama"})


def open_model(model: StoredModel, cache_dir: Path) -> StoredModel | None:
    """Read the file of a model; None if it is only a part, such as a projector.

    Ollama's manifests name models, so there it is a problem instead.
    """
    if model.problem:
        return model
    with suppress(OSError):
        model = replace(model, size_bytes=model.path.stat().st_size)
    if model.store in _SHARED and (problem := foreign_owner(model.path)):
        return replace(model, problem=problem)
    try:
        gguf = metadata.read(model.path, cache_dir=cache_dir)
    except ModelInvalid as error:
        return replace(model, problem=error.message.replace(f"{model.path} ", "it ", 1))
    if gguf.kind != "model":
        problem = f"it holds no model: {gguf.kind}"
        return replace(model, problem=problem) if model.store == "ollama" else None
    return _describe_model(model, gguf, cache_dir)


def _describe_model(found: StoredModel, gguf: Gguf, cache_dir: Path) -> StoredModel:
    problem = None
    if gguf.holds_encoder:
        problem = (
            "its picture encoder is in the same file, which only Ollama's own engine reads; "
            "fetch the model from Hugging Face"
        )
    elif not gguf.layers:
        problem = f"its architecture {gguf.architecture or 'is missing'} has no layers of text"
    kind, projector = "" if problem else kind_of(gguf), found.projector
    if kind == "chat" and not projector:
        projector, _ = find_projector(gguf, cache_dir)
    return replace(
        found,
        size_bytes=gguf.size_bytes,
        kind=kind,
        quantisation=gguf.quantisation,
        projector=projector,
        problem=problem,
    )


def kind_of(gguf: Gguf) -> str:
    if gguf.pooling == "rank":
        return "rerank"
    return "embedding" if gguf.pooling is not None or not gguf.is_causal else "chat"
