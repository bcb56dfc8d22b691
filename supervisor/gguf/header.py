"""Walks the header of a GGUF file: its metadata and where its tensors lie.

The `gguf` package's own reader builds an array for every string of the vocabulary, which takes two
seconds for 49 000 tokens, and raises a different numpy error at every place where a file may be
cut. This one keeps scalars, strings and short arrays, counts the rest, and knows one error.
`walker.py` reads the values, `hyperparameters.py` bounds what they say. What the numbers mean
(block sizes, names of file types) still comes from that package.

Source: docs/gguf.md of ggml, GGUF versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from supervisor.errors import ModelInvalid
from supervisor.gguf import hyperparameters
from supervisor.gguf.walker import ARRAY, STRING, Damaged, Scalar, Walker

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = frozenset({2, 3})
_ALIGNMENT: Final = 32
_ALIGNMENT_MAX: Final = 1 << 16
# What a key with the smallest value takes, a tensor without dimensions, an empty string.
_PAIR_MIN_BYTES: Final = 8 + 4 + 1
_TENSOR_MIN_BYTES: Final = 8 + 4 + 4 + 8
_STRING_MIN_BYTES: Final = 8
# More than any model has. Real ones have some 50 keys and 2 000 tensors; 50 000 tensors were seen
# where each expert had its own. Source: ggml.h, GGML_MAX_DIMS and, for names, GGML_MAX_NAME, 64.
_PAIRS_MAX: Final = 1 << 14
_TENSORS_MAX: Final = 1 << 16
_ARRAY_MAX: Final = 1 << 24
_KEY_MAX_BYTES: Final = 1024
_TENSOR_NAME_MAX_BYTES: Final = 256
_DIMENSIONS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array of weights.

    Attributes:
        name: Such as `blk.0.ffn_up.weight`.
        offset: In bytes from where the weights begin.
        kind: Its ggml type.
        shape: The length of a row first.
    """

    name: str
    offset: int
    kind: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of its weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """What stands before the weights.

    Attributes:
        metadata: By key. Arrays of more than 1024 elements, and arrays of strings, are not kept.
        lengths: The number of elements of every array.
        tensors: All there are, in the order of the file.
        data_at: Where the weights begin, in bytes from the start of the file.
        strings: The array of strings that was asked for; empty without it.
    """

    metadata: Mapping[str, Scalar | tuple[Scalar, ...]]
    lengths: Mapping[str, int]
    tensors: tuple[Tensor, ...]
    data_at: int
    strings: tuple[bytes, ...]

    @property
    def elements(self) -> int:
        """Return the number of weights."""
        return sum(tensor.elements for tensor in self.tensors)

    def text(self, key: str) -> str:
        """Return a string of the metadata; empty where there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or an array of them; empty where there is none."""
        value = self.metadata.get(key, ())
        values = value if isinstance(value, tuple) else (value,)
        return tuple(one for one in values if isinstance(one, int))

    def integer(self, key: str, otherwise: int = 0) -> int:
        """Return an integer, the greatest of an array, or `otherwise` where there is none."""
        return max(self.integers(key), default=otherwise)


def read(file: BinaryIO, name: str, strings_of: str = "") -> Header:
    """Return the header of an open file.

    Args:
        file: Open for reading at its start.
        name: What to call it in an error.
        strings_of: The key of an array of strings to keep, or nothing.

    Raises:
        ModelInvalid: It is empty, no GGUF, of a version that is not read, cut short, or says of
            itself what no model can be.
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
            f"{name} is cut short or damaged: {error}", hint="download the file again"
        ) from error
    if wrong := hyperparameters.trouble(found.metadata, found.lengths):
        raise ModelInvalid(f"{name} is no model: {wrong}", hint="download the file again")
    return found


def _check_magic(magic: bytes, name: str) -> None:
    if not magic:
        raise ModelInvalid(f"{name} is empty", hint="download the file again")
    if magic != _MAGIC:
        raise ModelInvalid(
            f"{name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'",
            hint="give the path of a .gguf file",
        )


def _check_version(version: int, name: str) -> None:
    if version not in _VERSIONS:
        raise ModelInvalid(
            f"{name} is a GGUF of version {version}; 2 and 3 are read",
            hint="convert the model anew with a current llama.cpp",
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
    """Return an array of numbers where it is short enough, its length, and strings to be kept."""
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
        raise Damaged(f"general.alignment is no power of two up to {_ALIGNMENT_MAX}")
    return found


def _check_elements(tensors: Iterable[Tensor], size_bytes: int) -> None:
    """Refuse more weights than the file has bits; no type has less than one bit a weight."""
    for tensor in tensors:
        if tensor.elements > 8 * size_bytes:
            raise Damaged(f"a tensor of {tensor.elements:,} weights does not fit into the file")
