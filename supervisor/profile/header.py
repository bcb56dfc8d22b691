"""Walks the header of a GGUF file: its metadata and where its tensors lie.

The `gguf` package's own reader builds an array for every string of the vocabulary, which takes two
seconds for 49 000 tokens, and raises a different numpy error at every place where a file may be
cut. This one keeps scalars, strings and short arrays, counts the rest, and knows one error. What
the numbers mean (block sizes, names of file types) still comes from that package.

Source: docs/gguf.md of ggml, GGUF versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from supervisor.errors import ModelInvalid

Scalar = str | int | float | bool

_MAGIC: Final = b"GGUF"
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_ARRAY: Final = 9
# The longest array kept whole: one value a layer, for any model there is.
_ARRAY_KEPT: Final = 1024
# Nothing of sense is larger; beyond it the file is damaged, and must not cost memory or time.
_STRING_MAX: Final = 16 * 1024**2
_COUNT_MAX: Final = 1 << 24
_ALIGNMENT: Final = 32


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


class _Cut(Exception):
    """The file ends, or makes no sense, inside its header."""


def read(file: BinaryIO, name: str, strings_of: str = "") -> Header:
    """Return the header of an open file.

    Args:
        file: Open for reading at its start.
        name: What to call it in an error.
        strings_of: The key of an array of strings to keep, or nothing.

    Raises:
        ModelInvalid: It is empty, no GGUF, of a version that is not read, or cut short.
    """
    _check_magic(file.read(4), name)
    walker = _Walker(file, strings_of)
    try:
        version = walker.number("I")
        if version not in {2, 3}:
            raise ModelInvalid(
                f"{name} is a GGUF of version {version}; 2 and 3 are read",
                hint="convert the model anew with a current llama.cpp",
            )
        return walker.header()
    except _Cut as error:
        raise ModelInvalid(
            f"{name} is cut short or damaged: its header does not end",
            hint="download the file again",
        ) from error


def _check_magic(magic: bytes, name: str) -> None:
    if not magic:
        raise ModelInvalid(f"{name} is empty", hint="download the file again")
    if magic != _MAGIC:
        raise ModelInvalid(
            f"{name} is not a GGUF file: it begins with {magic!r}, not b'GGUF'",
            hint="give the path of a .gguf file",
        )


class _Walker:
    """Reads one value after the other."""

    def __init__(self, file: BinaryIO, strings_of: str) -> None:
        self._file = file
        self._strings_of = strings_of
        self._kept: tuple[bytes, ...] = ()
        self._metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
        self._lengths: dict[str, int] = {}

    def header(self) -> Header:
        tensors, pairs = self._count(), self._count()
        for _ in range(pairs):
            self._pair()
        found = tuple(self._tensor() for _ in range(tensors))
        alignment = self._metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Cut
        data_at = -(-self._file.tell() // alignment) * alignment
        return Header(self._metadata, self._lengths, found, data_at, self._kept)

    def number(self, code: str) -> int:
        value = self._scalar(code)
        if not isinstance(value, int):
            raise _Cut
        return value

    def _pair(self) -> None:
        key = self._string()
        kind = self.number("I")
        if kind == _ARRAY:
            self._array(key)
        else:
            self._metadata[key] = self._value(kind)

    def _array(self, key: str) -> None:
        kind, count = self.number("I"), self._count()
        self._lengths[key] = count
        if kind == _STRING:
            strings = self._strings(count)
            self._kept = strings if key == self._strings_of else self._kept
        elif count <= _ARRAY_KEPT:
            self._metadata[key] = tuple(self._value(kind) for _ in range(count))
        else:
            self._skip(count * struct.calcsize(self._format(kind)))

    def _strings(self, count: int) -> tuple[bytes, ...]:
        """Return an array of strings. A vocabulary has 262 144, so that each call counts."""
        read, length, found = self._file.read, struct.Struct("<Q").unpack, []
        for _ in range(count):
            head = read(8)
            if len(head) < 8 or (size := length(head)[0]) > _STRING_MAX:
                raise _Cut
            text = read(size)
            if len(text) < size:
                raise _Cut
            found.append(text)
        return tuple(found)

    def _tensor(self) -> Tensor:
        name = self._string()
        shape = tuple(self.number("Q") for _ in range(min(self.number("I"), 8)))
        kind, offset = self.number("I"), self.number("Q")
        return Tensor(name, offset, kind, shape)

    def _value(self, kind: int) -> Scalar:
        return self._string() if kind == _STRING else self._scalar(self._format(kind))

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _FORMATS:
            raise _Cut
        return _FORMATS[kind]

    def _scalar(self, code: str) -> Scalar:
        value: Scalar = struct.unpack(f"<{code}", self._bytes(struct.calcsize(code)))[0]
        return value

    def _string(self) -> str:
        return self._bytes(self._length()).decode("utf-8", errors="replace")

    def _length(self) -> int:
        length = self.number("Q")
        if length > _STRING_MAX:
            raise _Cut
        return length

    def _count(self) -> int:
        count = self.number("Q")
        if count > _COUNT_MAX:
            raise _Cut
        return count

    def _bytes(self, size: int) -> bytes:
        found = self._file.read(size)
        if len(found) < size:
            raise _Cut
        return found

    def _skip(self, size: int) -> None:
        self._bytes(size)
