"""Which model of a repository to take: the one that is named, or the order to try them in. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Final

from supervisor.errors import NoSuchModel
from supervisor.hub import reference
from supervisor.hub.file_names import FileGroup, FileKind, FileName
from supervisor.hub.reference import HubReference
from supervisor.hub.repository import Repository
from supervisor.output import size

# Small models lose most by quantisation, and 8 bits cost them little.
EIGHT_BITS_MAX_BYTES: Final = 2 * 1024**3
# The usual width first: half the size of 8 bits at nearly the same quality. Then what loses
# nothing, then what loses more. Source: llama.cpp, tools/quantize/README.md; `llama-server -hf`
# takes Q4_K_M unless another is named.
_BITS: Final = (4, 5, 6, 8, 16, 32, 3, 2, 1)
# Of one width, by their ends; K_M is what most people run.
_ENDS: Final = ("K_M", "K_XL", "K_L", "K_S", "XS", "NL", "_S", "_M", "_XXS", "_0", "_1")
# Repacked by their publisher for one kind of processor; llama.cpp reads them no more.
_REMOVED: Final = re.compile(r"Q4_0_[48]_[48]")
_LISTED: Final = 40
_KINDS: Final = (FileKind.MODEL, FileKind.DRAFT)


def models(repository: Repository) -> tuple[FileGroup, ...]:
    """The models whose shards are all there; of a repository of drafts alone, those."""
    whole = [one for one in repository.groups if one.is_complete]
    of_kind = ([one for one in whole if one.first.kind is kind] for kind in _KINDS)
    return tuple(next((found for found in of_kind if found), ()))


def named(repository: Repository, wanted: HubReference) -> FileGroup:
    """Return what the user named, of any kind.

    Raises:
        NoSuchModel: There is no such file or quantisation, or there are several.
    """
    if wanted.file:
        return _by_file(repository, wanted)
    found = models(repository)
    labels = reference.matching({one.first.quantisation for one in found}, wanted.quantisation)
    fitting = [one for one in found if one.first.quantisation in labels]
    if not fitting:
        raise NoSuchModel(
            f"{wanted.repo} has no {wanted.quantisation}", hint=_available(repository, found)
        )
    return _only(wanted.repo, fitting)


def preferred(repository: Repository) -> tuple[FileGroup, ...]:
    """The models of a repository, best first.

    Raises:
        NoSuchModel: It has none, or several different ones.
    """
    found = [one for one in models(repository) if not _REMOVED.search(one.first.quantisation)]
    if not found:
        raise NoSuchModel(
            f"{repository.repo} has no GGUF model",
            hint="corral model search WORDS finds repositories that have; "
            "many are named like the model with -GGUF at the end",
        )
    _check_same(repository.repo, found)
    return tuple(sorted(found, key=lambda one: _rank(repository, one)))


def _by_file(repository: Repository, wanted: HubReference) -> FileGroup:
    for group in repository.groups:
        if any(one.path == wanted.file for one in group.files):
            if group.is_complete:
                return group
            raise NoSuchModel(f"{wanted.repo} lacks shards of {wanted.file}")
    raise NoSuchModel(
        f"{wanted.repo} has no file {wanted.file}",
        hint=_available(repository, repository.groups),
    )


def _rank(repository: Repository, group: FileGroup) -> tuple[object, ...]:
    name, size_bytes = group.first, repository.size_bytes(group)
    is_small = name.quantisation == "Q8_0" and size_bytes <= EIGHT_BITS_MAX_BYTES
    bits = _BITS.index(name.bits) if name.bits in _BITS else len(_BITS)
    return (not is_small, bits, _end(name), name.path.count("/"), -size_bytes, name.path)


def _end(name: FileName) -> int:
    return next((at for at, one in enumerate(_ENDS) if name.quantisation.endswith(one)), len(_ENDS))


def _only(repo: str, found: list[FileGroup]) -> FileGroup:
    _check_same(repo, found)
    return min(found, key=lambda one: (one.first.path.count("/"), one.first.path))


def _check_same(repo: str, found: Iterable[FileGroup]) -> None:
    names = sorted({one.first.path for one in found})
    if len({_model_of(one.first) for one in found}) > 1:
        shown = ", ".join(names[:_LISTED])
        raise NoSuchModel(
            f"{repo} has several models: {shown}", hint=f"name one file: {repo}:{names[0]}"
        )


def _model_of(name: FileName) -> str:
    """The name without its quantisation."""
    stem = PurePosixPath(name.prefix).name.upper().replace("FP16", "F16").replace("FP32", "F32")
    return re.sub(r"[-_.]+", "-", stem.replace(name.quantisation, "", 1)).strip("-")


def _available(repository: Repository, found: Iterable[FileGroup]) -> str:
    sizes = {_label(one): size(repository.size_bytes(one)) for one in found}
    listed = [f"{label} ({amount})" for label, amount in sizes.items()][:_LISTED]
    return f"available: {', '.join(listed)}" if listed else "it has no GGUF model"


def _label(group: FileGroup) -> str:
    name = group.first
    is_model = name.kind is FileKind.MODEL and name.quantisation
    return name.quantisation if is_model else name.path
