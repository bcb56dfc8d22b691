"""Parses the names of GGUF files: kind, quantisation and shards. Pure.

Used for files that cannot be opened yet; the metadata of a local file is more reliable.

Source: llama.cpp, common/download.cpp, for shards, projectors and draft heads; the file names of
quantisers (ggml-org, unsloth, bartowski, mradermacher, lmstudio).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final, Literal

_SUFFIX: Final = ".gguf"
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_QUANTISATION: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?"
    r"(?:I?Q[1-8](?:_[01K])?(?:_(?:NL|XXS|XS|S|M|L|XL|XXL))?(?:_[48]_[48])?"
    r"|TQ[12]_0|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
# `NAME-DRAFT-0.6B` is a small model, not a part of another.
_DRAFT: Final = re.compile(r"(?:^|[-_.])(?:mtp|eagle3|dflash|dspark)-|^draft-|-mtp$", re.IGNORECASE)
_ADAPTER: Final = re.compile(r"(?:^|[-_.])lora(?:[-_.]|$)", re.IGNORECASE)
_NAME_MAX: Final = 64  # of a model in corral.toml


# A projector makes images or audio into tokens, a draft is a draft model or draft heads, an adapter
# is a LoRA, an imatrix has measurements of a quantiser.
FileKind = Literal["model", "projector", "draft", "adapter", "imatrix"]


@dataclass(frozen=True, slots=True)
class FileName:
    """The parsed path of a GGUF file, on disk or in a repository."""

    path: str
    prefix: str  # the path without shard number and suffix
    kind: FileKind
    quantisation: str  # in capitals; empty if the name tells none
    shard: int  # from 1
    shards: int

    @property
    def bits(self) -> int:
        return bits(self.quantisation)


@dataclass(frozen=True, slots=True)
class FileGroup:
    """A model, projector or other part, with all its shards in order."""

    files: tuple[FileName, ...]

    @property
    def first(self) -> FileName:
        return self.files[0]

    @property
    def is_complete(self) -> bool:
        return tuple(file.shard for file in self.files) == tuple(range(1, self.first.shards + 1))


def parse_file_name(path: str) -> FileName | None:
    """Parse the path of a file; None if it is not a GGUF."""
    if not path.lower().endswith(_SUFFIX):
        return None
    prefix, shard, shards = path[: -len(_SUFFIX)], 1, 1
    if split := _SHARD.fullmatch(prefix):
        prefix, shard, shards = split[1], int(split[2]), int(split[3])
    return FileName(path, prefix, _kind(prefix), _quantisation(prefix), shard, shards)


def group(paths: Iterable[str]) -> tuple[FileGroup, ...]:
    """Group shards by model, sorted by path; files that are not GGUF are left out."""
    found: dict[tuple[str, int], list[FileName]] = defaultdict(list)
    for path in sorted(paths):
        if name := parse_file_name(path):
            found[name.prefix, name.shards].append(name)
    return tuple(FileGroup(tuple(names)) for names in found.values())


def companion(groups: Sequence[FileGroup], model: FileName, kind: FileKind) -> FileGroup | None:
    """Find the projector or draft of a model: in the nearest directory, then of the nearest size.

    F16 wins over F32 and over BF16, which old processors lack.
    """
    found = [group for group in groups if group.first.kind is kind and group.is_complete]
    return min(found, key=lambda group: _distance(group.first, model), default=None)


def bits(quantisation: str) -> int:
    """Return about how many bits a weight has; 0 if unknown."""
    found = re.search(r"\d+", quantisation)
    return int(found[0]) if found else 0


def model_name(path: str) -> str:
    """Make a model name from a file name; characters that names cannot have become `-`."""
    name = parse_file_name(PurePosixPath(path).name)
    stem = name.prefix if name else PurePosixPath(path).stem
    return clean(stem)[:_NAME_MAX] or "model"


def clean(name: str) -> str:
    """Replace characters that names of models cannot have by `-`; the result may be empty."""
    return re.sub(r"[^A-Za-z0-9._:@+-]+", "-", name).lstrip("._:@+-")


def _kind(prefix: str) -> FileKind:
    name = PurePosixPath(prefix).name.lower()
    if "mmproj" in name:
        return "projector"
    if "imatrix" in name:
        return "imatrix"
    if _DRAFT.search(name):
        return "draft"
    return "adapter" if _ADAPTER.search(name) else "model"


def _quantisation(prefix: str) -> str:
    """Find it in the name, or else in the directory: `Q4_K_M/model-00001-of-00002.gguf`."""
    for part in reversed(PurePosixPath(prefix).parts[-2:]):
        if found := _QUANTISATION.findall(part):
            return re.sub(r"^FP", "F", found[-1].upper())
    return ""


def _distance(name: FileName, model: FileName) -> tuple[int, int, bool, str]:
    theirs, ours = PurePosixPath(name.path).parts[:-1], PurePosixPath(model.path).parts[:-1]
    shared = 0
    while shared < min(len(theirs), len(ours)) and theirs[shared] == ours[shared]:
        shared += 1
    apart = len(theirs) + len(ours) - 2 * shared
    return apart, abs(name.bits - model.bits), name.quantisation == "BF16", name.path
