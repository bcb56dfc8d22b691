"""Which files a removal takes, and who else has to remove a model. Deletes in `remove_files`."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from supervisor.hub.file_names import FileKind, group
from supervisor.model_stores.stored_model import StoredModel

# Caches, of which each program that shares them may delete; the rest has a keeper of its own.
_OURS: Final = frozenset({"corral", "huggingface", "llama.cpp"})


def keeper_hint(model: StoredModel) -> str | None:
    """Return how a model is removed that is not ours to remove; None if it is."""
    if model.store in _OURS:
        return None
    if model.store == "ollama":
        return f"ollama rm {model.name.partition('@')[0]}"
    if model.store == "lmstudio":
        return "remove it in LM Studio, under My Models"
    return f"rm {model.path}" + (" and its other shards" if len(model.files) > 1 else "")


def doomed(model: StoredModel) -> tuple[Path, ...]:
    """Return the files of a model, with those beside it that only it uses, and blobs behind."""
    directory = model.path.parent
    names = [path.name for path in _entries(directory) if path.exists()]
    groups = group(names)
    own = {path.name for path in model.files}
    models = [one for one in groups if one.first.kind is FileKind.MODEL]
    is_last = all(part.path in own for one in models for part in one.files)
    beside = [
        directory / part.path
        for one in groups
        for part in one.files
        if one.first.kind is not FileKind.MODEL and is_last and model.store == "huggingface"
    ]
    found = [*model.files, *beside]
    return tuple(dict.fromkeys([*found, *_blobs(found)]))


def _blobs(links: Sequence[Path]) -> Iterator[Path]:
    """Yield the blobs of the Hugging Face cache to which no other link leads."""
    for link in filter(Path.is_symlink, links):
        blob = link.resolve()
        # A link may lead anywhere; a blob of its own repository is beside its snapshots.
        snapshots = blob.parent.parent / "snapshots"
        is_own = blob.parent.name == "blobs" and snapshots in link.parent.resolve().parents
        others = (path for path in snapshots.rglob("*") if path.is_symlink() and path not in links)
        if is_own and not any(path.resolve() == blob for path in others):
            yield blob


def bytes_of(files: Iterable[Path]) -> int:
    """Return what files take on the disk, those behind links not counted."""
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def remove_files(files: Sequence[Path], root: Path) -> None:
    """Delete files, then what is empty below a root: directories, repositories of the cache.

    Raises:
        OSError: One cannot be deleted; those before it are.
    """
    for path in files:
        path.unlink(missing_ok=True)
    for directory in dict.fromkeys(path.parent for path in files):
        _remove_empty(directory, root)
    for repository in {one for path in files for one in path.parents if one.parent == root}:
        if repository.name.startswith("models--") and not _has_files(repository):
            shutil.rmtree(repository, ignore_errors=True)


def _remove_empty(directory: Path, root: Path) -> None:
    while root in directory.parents:
        try:
            directory.rmdir()
        except OSError:  # it is not empty
            return
        directory = directory.parent


def _has_files(repository: Path) -> bool:
    """Whether a repository of the cache has any file but the names of its revisions."""
    kept = (path for name in ("snapshots", "blobs") for path in (repository / name).rglob("*"))
    return any(not path.is_dir() or path.is_symlink() for path in kept)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []
