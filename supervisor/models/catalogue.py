"""Lists all models on this machine under unique names, and finds files to delete."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.models import local_stores
from supervisor.models.file_names import FileGroup, group
from supervisor.models.local_stores import Root
from supervisor.models.stored_model import Store, StoredModel, open_model, walk_files
from supervisor.system.files import open_regular

_CACHES: Final[frozenset[Store]] = frozenset({"huggingface", "llama.cpp"})
_NOTHING: Final[Mapping[Path, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Catalogue:
    models: tuple[StoredModel, ...]
    notes: tuple[str, ...] = ()

    def find(self, word: str) -> StoredModel | None:
        """Find a model by its name or id; as in Ollama, NAME also means `NAME:latest`."""
        by_name = {model.id: model for model in self.models}
        by_name |= {model.name: model for model in self.models}
        return by_name.get(word) or by_name.get(f"{word}:latest")


def search(
    places: Sequence[Root],
    cache_dir: Path,
    taken: Collection[str] = (),
    pinned: Mapping[Path, str] = _NOTHING,
) -> Catalogue:
    """Search all places; no model gets a name of `taken`, files of `pinned` get the given names."""
    notes: list[str] = []
    found = (
        replace(file, name=pinned.get(file.path, file.name))
        for root in places
        for file in unopened_models(root, notes)
    )
    models = [model for file in found if (model := open_model(file, cache_dir))]
    return Catalogue(tuple(give_unique_names(_without_copies(models), taken)), tuple(notes))


def unopened_models(root: Root, notes: list[str]) -> Iterator[StoredModel]:
    """Yield the files of one place that may be models; notes the places that it cannot see."""
    store, path = root
    if store == "ollama":
        yield from local_stores.search_ollama(path, notes)
    elif store in _CACHES:
        yield from local_stores.search_cache(path, store, notes)
    else:
        yield from local_stores.search_folder(path, store, notes)
    if store == "llama.cpp":
        yield from local_stores.search_flat_cache(path, notes)


def _without_copies(models: Iterable[StoredModel]) -> Iterator[StoredModel]:
    """Yield each file once per name, even if several directories contain it."""
    seen: set[tuple[str, str]] = set()
    for model in models:
        key = (os.path.realpath(model.path), model.name)
        if key not in seen:
            seen.add(key)
            yield model


def give_unique_names(
    models: Iterable[StoredModel], taken: Collection[str]
) -> Iterator[StoredModel]:
    """Give each model a unique name, if necessary NAME@STORE or NAME@STORE-NUMBER."""
    names = set(taken)
    numbers: dict[str, Iterator[str]] = {}
    for model in models:
        longer = f"{model.name}@{model.store}"
        further = numbers.setdefault(longer, (f"{longer}-{number}" for number in count(2)))
        renamed = (replace(model, name=name) for name in chain((model.name, longer), further))
        found = next(model for model in renamed if not names & {model.name, model.id})
        names |= {found.name, found.id}
        yield found


# Every program that shares these caches may delete from them; other stores have an owner.
_OURS: Final = _CACHES | {"corral"}


def keeper_hint(model: StoredModel) -> str | None:
    """Tell how to remove a model with its store's own program; None if we may remove it."""
    if model.store in _OURS:
        return None
    if model.store == "ollama":
        return f"ollama rm {model.name.partition('@')[0]}"
    if model.store == "lmstudio":
        return "remove it in LM Studio, under My Models"
    return f"rm {model.path}" + (" and its other shards" if len(model.files) > 1 else "")


def files_to_remove(model: StoredModel) -> tuple[Path, ...]:
    """Return the files of a model, other files that only it uses, and the blobs behind links."""
    directory, names = model.path.parent, list[str]()
    with suppress(OSError):
        names = [path.name for path in directory.iterdir() if path.exists()]
    groups = group(names)
    own = {path.name for path in model.files}
    models = [group for group in groups if group.first.kind == "model"]
    is_last = all(part.path in own for group in models for part in group.files)
    beside = [
        directory / part.path
        for group in groups
        for part in group.files
        if group.first.kind != "model" and is_last and model.store == "huggingface"
    ]
    found = [*model.files, *beside]
    return tuple(dict.fromkeys([*found, *_blobs(found)]))


def _blobs(links: Sequence[Path]) -> Iterator[Path]:
    """Yield the blobs of the Hugging Face cache to which no other link leads."""
    for link in filter(Path.is_symlink, links):
        blob = link.resolve()
        # A link may lead anywhere; the blobs of its repository are beside its snapshots.
        snapshots = blob.parent.parent / "snapshots"
        is_own = blob.parent.name == "blobs" and snapshots in link.parent.resolve().parents
        others = (path for path in snapshots.rglob("*") if path.is_symlink() and path not in links)
        if is_own and not any(path.resolve() == blob for path in others):
            yield blob


def bytes_of(files: Iterable[Path]) -> int:
    """Return the disk space of files, without the targets of links."""
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


def remove_files(files: Sequence[Path], root: Path) -> None:
    """Delete files, then empty directories and cache repositories below a root.

    Raises OSError: a file cannot be deleted; earlier ones are.
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
    """Return whether a repository of the cache contains more than the names of its revisions."""
    kept = (path for name in ("snapshots", "blobs") for path in (repository / name).rglob("*"))
    return any(not path.is_dir() or path.is_symlink() for path in kept)


# A running download writes more often than this.
_QUIET_S: Final = 60.0
_PARTIAL: Final = (".part", ".incomplete", ".downloadInProgress")
_MAGIC: Final = b"GGUF"


def leftovers(places: Sequence[Root], notes: list[str]) -> Iterator[tuple[Path, Path, str]]:
    """Yield each file that nothing needs, its root, and why, a clause; spares running downloads."""
    now_s = datetime.now(tz=UTC).timestamp()
    for store, root in places:
        for path, reason in _unneeded(store, root, notes):
            if path.suffix in _PARTIAL and now_s - path.lstat().st_mtime < _QUIET_S:
                notes.append(f"{path} was left: it was written in the last {_QUIET_S:.0f} s")
            else:
                yield path, root, reason


def _unneeded(store: Store, root: Path, notes: list[str]) -> Iterator[tuple[Path, str]]:
    if store == "corral":
        yield from _own_leftovers(root, notes)
    elif store in _CACHES:
        yield from _cache_leftovers(root, notes)
    if store == "llama.cpp":
        partial = (path for path in _files(root) if path.suffix in _PARTIAL)
        yield from ((path, "an unfinished download") for path in partial)


def _own_leftovers(root: Path, notes: list[str]) -> Iterator[tuple[Path, str]]:
    by_directory: dict[Path, list[str]] = {}
    for path in walk_files(root, notes):
        if path.suffix in _PARTIAL or path.relative_to(root).parts[0] == "wheels":
            yield path, "an unfinished download"
        else:
            by_directory.setdefault(path.parent, []).append(path.name)
    for directory, names in by_directory.items():
        for name, reason in _unused_parts(group(names)):
            yield directory / name, reason


def _unused_parts(groups: Sequence[FileGroup]) -> Iterator[tuple[str, str]]:
    """Yield shards of incomplete models, and companion files without a model."""
    whole = [file_group for file_group in groups if file_group.is_complete]
    has_model = any(file_group.first.kind == "model" for file_group in whole)
    for file_group in groups:
        if not file_group.is_complete:
            missing = file_group.first.shards - len(file_group.files)
            reason = f"{missing} of the {file_group.first.shards} shards of its model are missing"
        elif file_group.first.kind != "model" and not has_model:
            reason = f"a {file_group.first.kind} without a model beside it"
        else:
            continue
        yield from ((part.path, reason) for part in file_group.files)


def _cache_leftovers(root: Path, notes: list[str]) -> Iterator[tuple[Path, str]]:
    for repository in local_stores.repositories(root, notes):
        locks = root / ".locks" / repository.name
        links = [path for path in (repository / "snapshots").rglob("*") if path.is_symlink()]
        dangling = (path for path in links if path.suffix == ".gguf" and not path.exists())
        yield from ((path, "its blob is missing") for path in dangling)
        used = {os.path.realpath(path) for path in links}
        for blob in _files(repository / "blobs"):
            if blob.suffix == ".incomplete":
                if not _is_locked(locks / f"{blob.name.partition('.')[0]}.lock"):
                    yield blob, "an unfinished download"
            elif os.path.realpath(blob) not in used and _is_gguf(blob):
                yield blob, "a GGUF that no revision uses"


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_file())
    except OSError:
        return []


def _is_gguf(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _is_locked(lock: Path) -> bool:
    """Return whether a download holds the lock. Source: huggingface_hub (filelock); flock(2)."""
    try:
        with lock.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
