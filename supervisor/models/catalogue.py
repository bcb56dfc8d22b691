"""All models that are stored on this machine, each under its own name; their removal."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.models.file_names import FileGroup, FileKind, group
from supervisor.models.local_stores import (
    Root,
    in_cache,
    in_flat_cache,
    in_folder,
    in_store,
    repositories,
)
from supervisor.models.stored_model import Candidate, Store, StoredModel, Walk, open_candidate
from supervisor.system.files import open_regular

Search = Callable[[Path, Walk], Iterator[Candidate]]

_NOTHING: Final[Mapping[Path, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What was found, and why something was not looked at, as sentences."""

    models: tuple[StoredModel, ...]
    notes: tuple[str, ...] = ()

    def find(self, word: str) -> StoredModel | None:
        """Return the model of a name, or of the name as `[models.NAME]` has it.

        As with Ollama, a name without a tag stands for `NAME:latest`.
        """
        by_name = {model.id: model for model in self.models}
        by_name |= {model.name: model for model in self.models}
        return by_name.get(word) or by_name.get(f"{word}:latest")


def search(
    places: Sequence[Root],
    cache_dir: Path,
    taken: Collection[str] = (),
    pinned: Mapping[Path, str] = _NOTHING,
) -> Catalogue:
    """Look through every place where models are kept.

    Args:
        places: From `roots`.
        cache_dir: Of the metadata.
        taken: Names that others have.
        pinned: Names of files that have one already.
    """
    notes: list[str] = []
    found = (
        replace(candidate, name=pinned.get(candidate.path, candidate.name))
        for root in places
        for candidate in candidates(root, notes)
    )
    models = [model for candidate in found if (model := open_candidate(candidate, cache_dir))]
    return Catalogue(tuple(give_unique_names(_without_copies(models), taken)), tuple(notes))


def candidates(root: Root, notes: list[str]) -> Iterator[Candidate]:
    """Yield what may be models in one place, unopened; what was not seen is noted."""
    walk = Walk(root.path, notes=notes)
    for look in _SEARCHES[root.store]:
        yield from look(root.path, walk)


def _folder(store: Store) -> Search:
    return lambda root, walk: in_folder(root, store, walk)


def _cache_search(store: Store) -> Search:
    return lambda root, walk: in_cache(root, store, walk)


_SEARCHES: Final[Mapping[Store, tuple[Search, ...]]] = MappingProxyType(
    {
        "corral": (_folder("corral"),),
        "models_dir": (_folder("models_dir"),),
        "huggingface": (_cache_search("huggingface"),),
        "llama.cpp": (_cache_search("llama.cpp"), in_flat_cache),
        "lmstudio": (_folder("lmstudio"),),
        "ollama": (in_store,),
    }
)


def _without_copies(models: Iterable[StoredModel]) -> Iterator[StoredModel]:
    """Yield a file that several directories have once; the same blob may have several names."""
    seen: set[tuple[str, str]] = set()
    for model in models:
        key = (os.path.realpath(model.path), model.name)
        if key not in seen:
            seen.add(key)
            yield model


def give_unique_names(
    models: Iterable[StoredModel], taken: Collection[str]
) -> Iterator[StoredModel]:
    """Give each model a name of its own: the second one gets `@STORE` behind it, and a number."""
    names = set(taken)
    numbers: dict[str, Iterator[str]] = {}
    for model in models:
        longer = f"{model.name}@{model.store}"
        further = numbers.setdefault(longer, (f"{longer}-{number}" for number in count(2)))
        candidates = (replace(model, name=name) for name in chain((model.name, longer), further))
        found = next(
            candidate for candidate in candidates if not names & {candidate.name, candidate.id}
        )
        names |= {found.name, found.id}
        yield found


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


def files_to_remove(model: StoredModel) -> tuple[Path, ...]:
    """Return the files of a model, with those beside it that only it uses, and blobs behind."""
    directory = model.path.parent
    names = [path.name for path in _entries(directory) if path.exists()]
    groups = group(names)
    own = {path.name for path in model.files}
    models = [group for group in groups if group.first.kind is FileKind.MODEL]
    is_last = all(part.path in own for group in models for part in group.files)
    beside = [
        directory / part.path
        for group in groups
        for part in group.files
        if group.first.kind is not FileKind.MODEL and is_last and model.store == "huggingface"
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
    for repository in {
        parent for path in files for parent in path.parents if parent.parent == root
    }:
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


# A download writes more often than this.
_QUIET_S: Final = 60.0
_PARTIAL: Final = (".part", ".incomplete", ".downloadInProgress")
_WHEELS: Final = "wheels"
_MAGIC: Final = b"GGUF"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file that nothing needs; `reason` is a clause."""

    path: Path
    root: Path
    size_bytes: int
    reason: str


def leftovers(places: Sequence[Root], notes: list[str]) -> Iterator[Leftover]:
    """Yield what can be deleted of our directory and the shared caches; downloads go on."""
    for root in places:
        walk = Walk(root.path, notes=notes)
        for look in _LEFTOVER_SEARCHES.get(root.store, ()):
            for path, reason in look(root.path, walk):
                if _is_growing(path):
                    notes.append(f"{path} was left: it was written in the last {_QUIET_S:.0f} s")
                else:
                    yield Leftover(path, root.path, path.lstat().st_size, reason)


def _own_leftovers(root: Path, walk: Walk) -> Iterator[tuple[Path, str]]:
    by_directory: dict[Path, list[str]] = {}
    for path in walk.files():
        if path.suffix in _PARTIAL or path.relative_to(root).parts[0] == _WHEELS:
            yield path, "an unfinished download"
        else:
            by_directory.setdefault(path.parent, []).append(path.name)
    for directory, names in by_directory.items():
        for name, reason in _unused_parts(group(names)):
            yield directory / name, reason


def _unused_parts(groups: Sequence[FileGroup]) -> Iterator[tuple[str, str]]:
    """Yield parts of models that cannot be served, and parts for models that are not there."""
    whole = [file_group for file_group in groups if file_group.is_complete]
    has_model = any(file_group.first.kind is FileKind.MODEL for file_group in whole)
    for file_group in groups:
        if not file_group.is_complete:
            missing = file_group.first.shards - len(file_group.files)
            reason = f"{missing} of the {file_group.first.shards} shards of its model are missing"
        elif file_group.first.kind is not FileKind.MODEL and not has_model:
            reason = f"a {file_group.first.kind} without a model beside it"
        else:
            continue
        yield from ((part.path, reason) for part in file_group.files)


def _cache_leftovers(root: Path, walk: Walk) -> Iterator[tuple[Path, str]]:
    for repository in repositories(root, walk):
        locks = root / ".locks" / repository.name
        links = [path for path in (repository / "snapshots").rglob("*") if path.is_symlink()]
        yield from ((path, "its blob is missing") for path in links if _is_dangling_gguf(path))
        used = {os.path.realpath(path) for path in links}
        for blob in _files(repository / "blobs"):
            if blob.suffix == ".incomplete":
                if not _is_locked(locks / f"{blob.name.partition('.')[0]}.lock"):
                    yield blob, "an unfinished download"
            elif os.path.realpath(blob) not in used and _is_gguf(blob):
                yield blob, "a GGUF that no revision uses"


def _flat(root: Path, _walk: Walk) -> Iterator[tuple[Path, str]]:
    for path in _files(root):
        if path.suffix in _PARTIAL:
            yield path, "an unfinished download"


_LEFTOVER_SEARCHES: Final[
    Mapping[Store, tuple[Callable[[Path, Walk], Iterator[tuple[Path, str]]], ...]]
] = MappingProxyType(
    {
        "corral": (_own_leftovers,),
        "huggingface": (_cache_leftovers,),
        "llama.cpp": (_cache_leftovers, _flat),
    }
)


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_file())
    except OSError:
        return []


def _is_dangling_gguf(link: Path) -> bool:
    return link.suffix == ".gguf" and not link.exists()


def _is_gguf(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _is_locked(lock: Path) -> bool:
    """Whether a download holds its lock. Source: filelock, which huggingface_hub uses: flock(2)."""
    try:
        with lock.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _is_growing(path: Path) -> bool:
    now_s = datetime.now(tz=UTC).timestamp()
    return path.suffix in _PARTIAL and now_s - path.lstat().st_mtime < _QUIET_S
