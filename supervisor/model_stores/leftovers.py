"""Files of downloads that ended early, and what no model uses any more."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final

from supervisor.host.files import open_regular
from supervisor.hub.file_names import FileGroup, FileKind, group
from supervisor.model_stores.huggingface import repositories
from supervisor.model_stores.roots import Root
from supervisor.model_stores.stored_model import Store
from supervisor.model_stores.walk import Walk

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
        for look in _SEARCHES.get(root.store, ()):
            for path, reason in look(root.path, walk):
                if _is_growing(path):
                    notes.append(f"{path} was left: it was written in the last {_QUIET_S:.0f} s")
                else:
                    yield Leftover(path, root.path, path.lstat().st_size, reason)


def _ours(root: Path, walk: Walk) -> Iterator[tuple[Path, str]]:
    by_directory: dict[Path, list[str]] = {}
    for path in walk.files():
        if path.suffix in _PARTIAL or path.relative_to(root).parts[0] == _WHEELS:
            yield path, "an unfinished download"
        else:
            by_directory.setdefault(path.parent, []).append(path.name)
    for directory, names in by_directory.items():
        for name, reason in _unused(group(names)):
            yield directory / name, reason


def _unused(groups: Sequence[FileGroup]) -> Iterator[tuple[str, str]]:
    """Yield parts of models that cannot be served, and parts for models that are not there."""
    whole = [one for one in groups if one.is_complete]
    has_model = any(one.first.kind is FileKind.MODEL for one in whole)
    for one in groups:
        if not one.is_complete:
            missing = one.first.shards - len(one.files)
            reason = f"{missing} of the {one.first.shards} shards of its model are missing"
        elif one.first.kind is not FileKind.MODEL and not has_model:
            reason = f"a {one.first.kind} without a model beside it"
        else:
            continue
        yield from ((part.path, reason) for part in one.files)


def _cache(root: Path, walk: Walk) -> Iterator[tuple[Path, str]]:
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


_SEARCHES: Final[Mapping[Store, tuple[Callable[[Path, Walk], Iterator[tuple[Path, str]]], ...]]] = (
    MappingProxyType({"corral": (_ours,), "huggingface": (_cache,), "llama.cpp": (_cache, _flat)})
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
