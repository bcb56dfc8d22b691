"""Reads a GGUF header: metadata and the positions of the tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from supervisor.errors import ModelInvalid
from supervisor.gguf import hyperparameters
from supervisor.gguf.walker import ARRAY, STRING, Damaged, Scalar, Walker

# The `gguf` package's reader builds an array for every string of the vocabulary (two seconds for
# 49k tokens) and raises a different error at each place where a file may be cut. This one keeps
# scalars, strings and short arrays, counts the rest, and raises one error.
#
# Source: docs/gguf.md of ggml, GGUF versions 2 and 3, little-endian.

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = frozenset({2, 3})
_ALIGNMENT: Final = 32
_ALIGNMENT_MAX: Final = 1 << 16
# The least that a key with its value, a tensor and a string take.
_PAIR_MIN_BYTES: Final = 8 + 4 + 1
_TENSOR_MIN_BYTES: Final = 8 + 4 + 4 + 8
_STRING_MIN_BYTES: Final = 8
# Real models have some 50 keys and 2 000 tensors; 50 000 tensors were seen in one whose experts had
# tensors of their own. Source: ggml.h, GGML_MAX_DIMS and, for names, GGML_MAX_NAME, 64.
_PAIRS_MAX: Final = 1 << 14
_TENSORS_MAX: Final = 1 << 16
_ARRAY_MAX: Final = 1 << 24
_KEY_MAX_BYTES: Final = 1024
_TENSOR_NAME_MAX_BYTES: Final = 256
_DIMENSIONS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `offset` is in bytes from the start of the data, `shape[0]` is the row length."""

    name: str
    offset: int
    kind: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A GGUF header."""

    # By key, without arrays of strings and arrays of more than 1024 elements.
    metadata: Mapping[str, Scalar | tuple[Scalar, ...]]
    lengths: Mapping[str, int]  # the number of elements of every array, by key
    tensors: tuple[Tensor, ...]
    data_at: int  # start of the tensor data, in bytes from the start of the file
    strings: tuple[bytes, ...]  # the requested array of strings; empty if none was requested

    def text(self, key: str) -> str:
        """A string of the metadata; empty if missing."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def integers(self, key: str) -> tuple[int, ...]:
        """An integer or an array of them; empty if missing."""
        value = self.metadata.get(key, ())
        values = value if isinstance(value, tuple) else (value,)
        return tuple(one for one in values if isinstance(one, int))

    def integer(self, key: str, default: int = 0) -> int:
        """An integer, or the greatest of an array."""
        return max(self.integers(key), default=default)


def read(file: BinaryIO, name: str, strings_of: str = "") -> Header:
    """Read the header of an open file, and the array of strings at the key `strings_of`, if any.

    Raises:
        ModelInvalid: Empty, not a GGUF file, of another version, truncated, damaged or implausible.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    _check_magic(file.read(len(_MAGIC)), name)
    try:
        walker = Walker(file, max(0, size_bytes - len(_MAGIC)))
        _check_version(walker.u32(), name)
        found = _header(file, walker, strings_of)
        _check_elements(found.tensors, size_bytes)
    except Damaged as error:
        raise ModelInvalid(
            f"{name} is truncated or damaged: {error}", hint="download the file again"
        ) from error
    if problem := hyperparameters.problem(found.metadata, found.lengths):
        raise ModelInvalid(
            f"{name} is not a valid model: {problem}", hint="download the file again"
        )
    return found


def _check_magic(magic: bytes, name: str) -> None:
    if not magic:
        raise ModelInvalid(f"{name} is empty", hint="download the file again")
    if magic != _MAGIC:
        raise ModelInvalid(
            f"{name} is not a GGUF file: its first bytes are {magic!r}, not b'GGUF'",
            hint="give the path of a .gguf file",
        )


def _check_version(version: int, name: str) -> None:
    if version not in _VERSIONS:
        raise ModelInvalid(
            f"{name} has GGUF version {version}; supported are 2 and 3",
            hint="convert the model again with a current llama.cpp",
        )


def _header(file: BinaryIO, walker: Walker, strings_of: str) -> Header:
    tensors = walker.count("tensors", most=_TENSORS_MAX, each_bytes=_TENSOR_MIN_BYTES)
    pairs = walker.count("keys", most=_PAIRS_MAX, each_bytes=_PAIR_MIN_BYTES)
    metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
    lengths: dict[str, int] = {}
    kept: tuple[bytes, ...] = ()
    value: Scalar | tuple[Scalar, ...] | None
    for _ in range(pairs):
        key, kind = walker.name("a key", _KEY_MAX_BYTES), walker.u32()
        if kind == ARRAY:
            value, lengths[key], strings = _array(walker, keep=key == strings_of)
            kept = strings or kept
        else:
            value = walker.value(kind)
        if value is not None:
            metadata[key] = value
    found = tuple(_tensor(walker) for _ in range(tensors))
    alignment = _alignment(metadata)
    data_at = -(-file.tell() // alignment) * alignment
    return Header(metadata, lengths, found, data_at, kept)


def _array(
    walker: Walker, *, keep: bool
) -> tuple[tuple[Scalar, ...] | None, int, tuple[bytes, ...]]:
    """The values if they are few enough to keep, the length, and the strings if requested."""
    kind = walker.u32()
    if kind == STRING:
        count = walker.count("strings", most=_ARRAY_MAX, each_bytes=_STRING_MIN_BYTES)
        return None, count, walker.strings(count, keep=keep)
    count = walker.count("values", most=_ARRAY_MAX, each_bytes=1)
    values = walker.scalars(kind, count)
    return (values if len(values) == count else None), count, ()


def _tensor(walker: Walker) -> Tensor:
    name, dimensions = walker.name("the name of a tensor", _TENSOR_NAME_MAX_BYTES), walker.u32()
    if dimensions > _DIMENSIONS_MAX:
        raise Damaged(f"a tensor has {dimensions:,} dimensions, more than {_DIMENSIONS_MAX}")
    shape = walker.numbers(dimensions)
    return Tensor(name, kind=walker.u32(), offset=walker.u64(), shape=shape)


def _alignment(metadata: Mapping[str, object]) -> int:
    found = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(found, int) or not 0 < found <= _ALIGNMENT_MAX or found.bit_count() != 1:
        raise Damaged(f"general.alignment is not a power of two up to {_ALIGNMENT_MAX}")
    return found


def _check_elements(tensors: Iterable[Tensor], size_bytes: int) -> None:
    """Reject tensors larger than the file: no type has less than one bit per element."""
    for tensor in tensors:
        if tensor.elements > 8 * size_bytes:
            raise Damaged(f"a tensor of {tensor.elements:,} elements is larger than the file")
