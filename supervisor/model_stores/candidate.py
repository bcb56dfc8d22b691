"""A file that may be a model, before it was opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from supervisor.errors import ModelInvalid
from supervisor.gguf import metadata
from supervisor.gguf.metadata import Gguf
from supervisor.model_stores.owner import foreign_owner
from supervisor.model_stores.projector import beside
from supervisor.model_stores.stored_model import Store, StoredModel

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


def opened(candidate: Candidate, cache_dir: Path) -> StoredModel | None:
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
    return _described(found, gguf, cache_dir)


def _described(found: StoredModel, gguf: Gguf, cache_dir: Path) -> StoredModel:
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
    return beside(gguf, cache_dir).path if kind_of(gguf) == "chat" else None


def kind_of(gguf: Gguf) -> str:
    if gguf.pooling == "rank":
        return "rerank"
    return "embedding" if gguf.pooling is not None or not gguf.is_causal else "chat"


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
