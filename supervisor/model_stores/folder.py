"""GGUF files in a directory tree: `models_dir`, our own directory, LM Studio's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from supervisor.hub.file_names import FileGroup, FileKind, FileName, group
from supervisor.model_stores.candidate import Candidate
from supervisor.model_stores.stored_model import Store, label
from supervisor.model_stores.walk import Walk

# PUBLISHER/REPOSITORY/…/FILE
_REPOSITORY_PARTS = 3

# Names a file, with a tag: its quantisation, or its own name where several have that one.
NameOf = Callable[[FileName, str], str]


def in_folder(root: Path, store: Store, walk: Walk) -> Iterator[Candidate]:
    """Yield the models below a directory, by PUBLISHER/REPOSITORY:QUANT where it has such parts."""
    yield from of_files(root, walk.files(), store, path_name)


def of_files(
    root: Path, paths: Iterable[Path], store: Store, name_of: NameOf
) -> Iterator[Candidate]:
    """Yield one candidate for each model among files below a root."""
    below = {str(path.relative_to(root)): path for path in paths}
    groups = [one for one in group(below) if one.first.kind is FileKind.MODEL]
    short = Counter(name_of(one.first, _short_tag(one.first)) for one in groups)
    for one in groups:
        files = tuple(below[part.path] for part in one.files)
        name = name_of(one.first, _short_tag(one.first))
        if short[name] > 1:
            name = name_of(one.first, _stem(one.first))
        yield Candidate(name, store, files[0], root, files=files, problem=_problem(one, files))


def path_name(file: FileName, tag: str) -> str:
    """Name a file by its path, with a tag where that has a publisher and a repository."""
    parts = Path(file.prefix).parts
    if len(parts) < _REPOSITORY_PARTS:
        return label(parts[-1])
    return repository_name(parts[0], parts[1], file, tag)


def repository_name(publisher: str, repository: str, _file: FileName, tag: str) -> str:
    return label(publisher, f"{repository}:{tag}")


def _short_tag(file: FileName) -> str:
    return file.quantisation or _stem(file)


def _stem(file: FileName) -> str:
    return Path(file.prefix).name


def _problem(found: FileGroup, files: tuple[Path, ...]) -> str | None:
    if not found.is_complete:
        have, all_shards = len(found.files), found.first.shards
        return f"{all_shards - have} of its {all_shards} shards are missing"
    gone = [path for path in files if path.is_symlink() and not path.exists()]
    return f"the file behind the link {gone[0].name} is missing" if gone else None
