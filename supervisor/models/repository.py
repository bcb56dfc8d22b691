"""Lists the files of a hub repository at one commit, and chooses a model among them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from supervisor.errors import DownloadFailed, NoSuchModel
from supervisor.models import file_names, reference
from supervisor.models.file_names import FileGroup, FileName
from supervisor.models.reference import HubReference
from supervisor.output import size

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file; its digest is a SHA-256, or the SHA-1 of a git blob if it is not in LFS."""

    path: str
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        is_inside = not self.path.startswith("/") and ".." not in parts and parts
        if not is_inside or "\\" in self.path or not self.path.isprintable():
            raise DownloadFailed(f"the hub lists a file with the invalid path {self.path!r}")
        if not (_SHA256.fullmatch(self.digest) or _COMMIT.fullmatch(self.digest)):
            raise DownloadFailed(f"the hub gives no digest of {self.path}")


@dataclass(frozen=True, slots=True)
class Repository:
    """The GGUF files of a repository at one commit."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]  # by path

    def __post_init__(self) -> None:
        if not _COMMIT.fullmatch(self.commit):
            raise DownloadFailed(f"the hub gives no commit of {self.repo}")

    @property
    def groups(self) -> tuple[FileGroup, ...]:
        return file_names.group(self.files)

    def file(self, name: FileName) -> RemoteFile:
        return self.files[name.path]

    def size_bytes(self, group: FileGroup) -> int:
        return sum(self.file(file).size_bytes for file in group.files)


@dataclass(frozen=True, slots=True)
class FoundRepository:
    repo: str
    downloads: int  # in the last 30 days
    likes: int
    parameters: int | None  # number of weights; None if unknown
    date: str  # date of the last change, such as 2026-10-31; empty if unknown
    is_gated: bool  # whether users must accept conditions first


# Small models suffer most from quantisation, and 8 bits take little memory.
EIGHT_BITS_MAX_BYTES: Final = 2 * 1024**3
# The usual width first, which has half the size of 8 bits at nearly the same quality; then widths
# of higher quality, then of lower quality. Source: llama.cpp, tools/quantize/README.md;
# `llama-server -hf` takes Q4_K_M by default.
_BITS: Final = (4, 5, 6, 8, 16, 32, 3, 2, 1)
# The order of quantisations of equal width, by their ends; K_M is the most common.
_ENDS: Final = ("K_M", "K_XL", "K_L", "K_S", "XS", "NL", "_S", "_M", "_XXS", "_0", "_1")
# Repacked by their publisher for one kind of processor; llama.cpp no longer reads them.
_REMOVED: Final = re.compile(r"Q4_0_[48]_[48]")
_LISTED: Final = 40
_KINDS: Final = ("model", "draft")


def models(repository: Repository) -> tuple[FileGroup, ...]:
    """Return the complete models; in a repository that has only drafts, the drafts."""
    whole = [group for group in repository.groups if group.is_complete]
    of_kind = ([group for group in whole if group.first.kind is kind] for kind in _KINDS)
    return tuple(next((found for found in of_kind if found), ()))


def choose_named(repository: Repository, wanted: HubReference) -> FileGroup:
    """Return a named file, of any kind, or quantisation; raises NoSuchModel for none or several."""
    if wanted.file:
        return _by_file(repository, wanted)
    found = models(repository)
    labels = reference.matching({group.first.quantisation for group in found}, wanted.quantisation)
    fitting = [group for group in found if group.first.quantisation in labels]
    if not fitting:
        raise NoSuchModel(
            f"{wanted.repo} has no {wanted.quantisation}", hint=_available_text(repository, found)
        )
    _check_same(wanted.repo, fitting)
    return min(fitting, key=lambda group: (group.first.path.count("/"), group.first.path))


def rank_models(repository: Repository) -> tuple[FileGroup, ...]:
    """Return a repository's models, best first; raises NoSuchModel for none or different ones."""
    found = [group for group in models(repository) if not _REMOVED.search(group.first.quantisation)]
    if not found:
        raise NoSuchModel(
            f"{repository.repo} has no GGUF model",
            hint="corral model search WORDS finds repositories that have; "
            "many are named like the model with -GGUF at the end",
        )
    _check_same(repository.repo, found)
    return tuple(sorted(found, key=lambda group: _rank(repository, group)))


def _by_file(repository: Repository, wanted: HubReference) -> FileGroup:
    for group in repository.groups:
        if any(file.path == wanted.file for file in group.files):
            if group.is_complete:
                return group
            raise NoSuchModel(f"{wanted.repo} lacks shards of {wanted.file}")
    raise NoSuchModel(
        f"{wanted.repo} has no file {wanted.file}",
        hint=_available_text(repository, repository.groups),
    )


def _rank(repository: Repository, group: FileGroup) -> tuple[object, ...]:
    name, size_bytes = group.first, repository.size_bytes(group)
    is_small = name.quantisation == "Q8_0" and size_bytes <= EIGHT_BITS_MAX_BYTES
    bits = _BITS.index(name.bits) if name.bits in _BITS else len(_BITS)
    ends = (at for at, ending in enumerate(_ENDS) if name.quantisation.endswith(ending))
    end = next(ends, len(_ENDS))
    return (not is_small, bits, end, name.path.count("/"), -size_bytes, name.path)


def _check_same(repo: str, found: Iterable[FileGroup]) -> None:
    names = sorted({group.first.path for group in found})
    if len({_model_of(group.first) for group in found}) > 1:
        shown = ", ".join(names[:_LISTED])
        raise NoSuchModel(
            f"{repo} has several models: {shown}", hint=f"name one file: {repo}:{names[0]}"
        )


def _model_of(name: FileName) -> str:
    stem = PurePosixPath(name.prefix).name.upper().replace("FP16", "F16").replace("FP32", "F32")
    return re.sub(r"[-_.]+", "-", stem.replace(name.quantisation, "", 1)).strip("-")


def _available_text(repository: Repository, found: Iterable[FileGroup]) -> str:
    sizes = {}
    for group in found:
        name = group.first
        is_model = name.kind == "model" and name.quantisation
        label = name.quantisation if is_model else name.path
        sizes[label] = size(repository.size_bytes(group))
    listed = [f"{label} ({amount})" for label, amount in sizes.items()][:_LISTED]
    return f"available: {', '.join(listed)}" if listed else "it has no GGUF model"
