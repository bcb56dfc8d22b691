"""A stored model and its projector, and how a GGUF file is recognised as one.

Finds the projector (`mmproj`) that lies beside a model: pictures or sound become tokens by it. It
is taken only if it was made for a model of this width, and its name leaves no doubt: it is called
like the model, or has no name of its own and the directory has one model, in any number of
quantisations. Another model's projector of the same width would answer nonsense.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import ModelInvalid
from supervisor.models import metadata
from supervisor.models.file_names import (
    FileGroup,
    FileKind,
    FileName,
    companion,
    group,
    parse_file_name,
)
from supervisor.models.metadata import Gguf
from supervisor.system.ownership import foreign_owner

_HIDDEN: Final = "."


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one walk; at any of them it ends early, with a note."""

    entries: int = 50_000
    depth: int = 8
    time_s: float = 5.0


@dataclass(slots=True)
class Walk:
    """One walk through a tree.

    Attributes:
        notes: Why something was not seen, as sentences.
    """

    root: Path
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    notes: list[str] = field(default_factory=list)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _entries: int = 0
    _until_s: float = 0

    def files(self) -> Iterator[Path]:
        """Yield all files below the root by name, a link to a directory that was seen left out."""
        self._until_s = self.clock() + self.limits.time_s
        yield from self._below(self.root, 0)

    def _below(self, directory: Path, depth: int) -> Iterator[Path]:
        for path in self._names(directory):
            if self._is_spent():
                return
            if not os.path.isdir(path):  # noqa: PTH112 (Path.is_dir may raise)
                yield path
            elif depth < self.limits.depth:
                yield from self._below(path, depth + 1)
            else:
                self._note(f"{path} was not searched: more than {self.limits.depth} levels deep")

    def _names(self, directory: Path) -> list[Path]:
        try:
            found = directory.stat()
            if (found.st_dev, found.st_ino) in self._seen:
                return []
            self._seen.add((found.st_dev, found.st_ino))
            room = max(0, self.limits.entries - self._entries) + 1
            with os.scandir(directory) as entries:
                names = [entry.name for entry, _ in zip(entries, range(room), strict=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._note(f"{directory} cannot be read: {error.strerror}")
            return []
        return [directory / name for name in sorted(names) if not name.startswith(_HIDDEN)]

    def _is_spent(self) -> bool:
        self._entries += 1
        if self._entries > self.limits.entries:
            self._note(f"{self.root}: the search ended after {self.limits.entries:,} files")
        elif self.clock() > self._until_s:
            self._note(f"{self.root}: the search ended after {self.limits.time_s:g} s")
        else:
            return False
        return True

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


_FILES_MAX: Final = 256
_NO_NAME: Final = frozenset({"", "model"})


@dataclass(frozen=True, slots=True)
class Projector:
    """The projector of a model, with its size; or sentences on files that are none."""

    path: Path | None = None
    size_bytes: int = 0
    skipped: tuple[str, ...] = ()


def find_projector(model: Gguf, cache_dir: Path) -> Projector:
    """Choose the projector beside a model. Reads the directory, and headers or cached metadata."""
    own = parse_file_name(model.path.name)
    if own is None or own.kind is not FileKind.MODEL:
        return Projector()
    skipped: list[str] = []
    for directory in _directories(model.path):
        groups = group(_names(directory))
        named = [group for group in groups if _is_named_for(group.first, own, groups)]
        fitting = [
            group
            for group in named
            if _fits(directory / group.first.path, model, cache_dir, skipped)
        ]
        if chosen := companion(fitting, own, FileKind.PROJECTOR):
            path = directory / chosen.first.path
            return Projector(path, path.stat().st_size, tuple(skipped))
    return Projector(skipped=tuple(skipped))


def _directories(path: Path) -> Iterator[Path]:
    yield path.parent
    # Repositories have their shards in a directory for each quantisation, the projector above it.
    above = parse_file_name(f"{path.parent.name}.gguf")
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
    models = {_base(group.first) for group in groups if group.first.kind is FileKind.MODEL}
    return models <= {own}


def _base(file: FileName) -> str:
    """A name without `mmproj`, quantisation and separators."""
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

# The order in which a name is given; the second of two models gets `@STORE` behind it.
STORES: Final[tuple[Store, ...]] = (
    "corral",
    "models_dir",
    "huggingface",
    "llama.cpp",
    "lmstudio",
    "ollama",
)
_NAME_MAX: Final = 64
_DIGEST_CHARACTERS: Final = 8
_LABEL_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that was found.

    Attributes:
        name: What users call it, such as `qwen3:8b`, or `ORG/REPO:QUANT`.
        path: The GGUF file, of a split model its first shard.
        root: The directory of its store.
        files: All its shards.
        size_bytes: On the disk, all shards together, without the projector.
        kind: `chat`, `embedding` or `rerank`; empty with a problem.
        quantisation: Such as `Q4_K_M`; empty with a problem.
        projector: Its picture or sound encoder, or None.
        adapters: LoRA files that are part of it.
        problem: Why it cannot be served, or None.
    """

    name: str
    store: Store
    path: Path
    root: Path
    size_bytes: int = 0
    kind: str = ""
    quantisation: str = ""
    projector: Path | None = None
    adapters: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    problem: str | None = None

    @property
    def id(self) -> str:
        return model_id(self.name)

    @property
    def flags(self) -> dict[str, str]:
        """The flags for the files that belong to it."""
        found = {"mmproj": str(self.projector)} if self.projector else {}
        return found | ({"lora": ",".join(map(str, self.adapters))} if self.adapters else {})


def model_id(name: str) -> str:
    """Return a name as `[models.NAME]` may have it: without `/`, and 64 characters at most."""
    written = re.sub(r"[^A-Za-z0-9._:@+-]+", "-", name.replace("/", "--")).lstrip("._:@+-")
    if written and len(written) <= _NAME_MAX:
        return written
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    kept = written[: _NAME_MAX - len(digest) - 1] or "model"
    return f"{kept}-{digest}"


def label(*parts: str) -> str:
    """Join names that come from files and directories to one that clients can send."""
    cleaned = (re.sub(r"[^A-Za-z0-9._:@+-]+", "-", part).lstrip("._:@+-") for part in parts)
    return "/".join(part for part in cleaned if part)[:_LABEL_MAX] or "model"


# Stores that other programs and other users may keep; the rest was named by this user.
_SHARED: Final = frozenset({"huggingface", "llama.cpp", "lmstudio", "ollama"})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A file that may be a model; the attributes are those of StoredModel.

    Attributes:
        is_certain: Whether its store says that it is a model.
    """

    name: str
    store: Store
    path: Path
    root: Path
    projector: Path | None = None
    adapters: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    problem: str | None = None
    is_certain: bool = False


def open_candidate(candidate: Candidate, cache_dir: Path) -> StoredModel | None:
    """Read the header of a file; None for one that is no model of its own, such as a projector."""
    found = StoredModel(
        candidate.name,
        candidate.store,
        candidate.path,
        candidate.root,
        size_bytes=0 if candidate.problem else _size_bytes(candidate.path),
        projector=candidate.projector,
        adapters=candidate.adapters,
        files=candidate.files,
        problem=candidate.problem,
    )
    if found.problem:
        return found
    if candidate.store in _SHARED and (problem := foreign_owner(candidate.path)):
        return replace(found, problem=problem)
    try:
        gguf = metadata.read(candidate.path, cache_dir=cache_dir)
    except ModelInvalid as error:
        return replace(found, problem=error.message.replace(f"{candidate.path} ", "it ", 1))
    if gguf.kind != "model":
        problem = f"it holds no model: {gguf.kind}"
        return replace(found, problem=problem) if candidate.is_certain else None
    return _describe_model(found, gguf, cache_dir)


def _describe_model(found: StoredModel, gguf: Gguf, cache_dir: Path) -> StoredModel:
    problem = None
    if gguf.holds_encoder:
        problem = (
            "its picture encoder is in the same file, which only Ollama's own engine reads; "
            "fetch the model from Hugging Face"
        )
    elif not gguf.layers:
        problem = f"its architecture {gguf.architecture or 'is missing'} has no layers of text"
    return replace(
        found,
        size_bytes=gguf.size_bytes,
        kind="" if problem else kind_of(gguf),
        quantisation=gguf.quantisation,
        projector=found.projector or (None if problem else _projector(gguf, cache_dir)),
        problem=problem,
    )


def _projector(gguf: Gguf, cache_dir: Path) -> Path | None:
    return find_projector(gguf, cache_dir).path if kind_of(gguf) == "chat" else None


def kind_of(gguf: Gguf) -> str:
    if gguf.pooling == "rank":
        return "rerank"
    return "embedding" if gguf.pooling is not None or not gguf.is_causal else "chat"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
