"""Reads a GGUF header: metadata and positions of tensors.

A header is untrusted. Every count is compared with the bytes left in the file before anything is
read or allocated, and the totals are limited by the needs of the largest real models. So reading
any file costs at most about a second and some tens of MB.

The reader of the `gguf` package builds an array for every string of the vocabulary (two seconds for
49k tokens), and raises different errors for truncated files. This reader keeps scalars, strings and
short arrays, counts the rest, and raises a single error.

Source: docs/gguf.md of ggml, GGUF versions 2 and 3, little-endian; ggml/src/gguf.cpp for the limits
of names, dimensions and alignment.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO, Final

from supervisor.errors import ModelInvalid

Scalar = str | int | float | bool

STRING: Final = 8
ARRAY: Final = 9
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_MIB: Final = 1024**2
# The vocabulary and merges of Gemma 3, 262 144 tokens, take 11 MiB.
_HEADER_MAX_BYTES: Final = 64 * _MIB
# Strings in all arrays together: Gemma 3 has 777 000.
_STRINGS_MAX: Final = 1 << 21
# Strings of a kept vocabulary, and their bytes; each string costs some 80 bytes of memory.
_STRINGS_KEPT_MAX: Final = 1 << 19
_STRINGS_KEPT_BYTES: Final = 16 * _MIB
# The longest string kept (a chat template has some 20 KiB), and all strings together.
_TEXT_KEPT_BYTES: Final = _MIB
_TEXTS_MAX_BYTES: Final = 8 * _MIB
# The longest array kept: one value per layer of any model.
ARRAY_KEPT: Final = 1024
# Values of all kept arrays together.
_KEPT_MAX: Final = 1 << 18


class Damaged(Exception):
    """The header is truncated or implausible; the text says how."""


class Walker:
    """Reads from an open file that has `size_bytes` left."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._read = file.read
        self._is_whole = size_bytes <= _HEADER_MAX_BYTES
        self._left_bytes = min(size_bytes, _HEADER_MAX_BYTES)
        self._strings_left = _STRINGS_MAX
        self._texts_left_bytes = _TEXTS_MAX_BYTES
        self._kept_left = _KEPT_MAX

    def u32(self) -> int:
        value: int = _U32.unpack(self._bytes(4))[0]
        return value

    def u64(self) -> int:
        value: int = _U64.unpack(self._bytes(8))[0]
        return value

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}Q", self._bytes(8 * count))

    def count(self, what: str, *, most: int, each_bytes: int) -> int:
        """Read the count of the next items, each of at least `each_bytes`.

        Raises Damaged: there are more than `most`, or more than the file can hold.
        """
        found = self.u64()
        self._claim(found * each_bytes, f"{found:,} {what}")
        if found > most:
            raise Damaged(f"it has {found:,} {what}, more than the limit of {most:,}")
        return found

    def name(self, what: str, most_bytes: int) -> str:
        size = self._length()
        if size > most_bytes:
            raise Damaged(f"{what} of {size:,} bytes is longer than {most_bytes:,}")
        return self._text(size)

    def value(self, kind: int) -> Scalar | None:
        """Read one value; None for a string too long to keep."""
        if kind != STRING:
            return self.scalars(kind, 1)[0]
        size = self._length()
        if size <= _TEXT_KEPT_BYTES:
            return self._text(size)
        self._skip(size)
        return None

    def scalars(self, kind: int, count: int) -> tuple[int | float | bool, ...]:
        """Read values of a fixed-size type; empty if they are too many to keep."""
        if kind not in _FORMATS:
            raise Damaged(f"its header has a value of the unknown type {kind}")
        code = _FORMATS[kind]
        size = struct.calcsize(code) * count
        if count > ARRAY_KEPT:
            self._skip(size)
            return ()
        self._kept_left -= count
        if self._kept_left < 0:
            raise Damaged(f"its arrays have more than {_KEPT_MAX:,} values")
        return struct.unpack(f"<{count}{code}", self._bytes(size))

    def strings(self, count: int, *, keep: bool) -> tuple[bytes, ...]:
        """Read an array of strings; empty unless `keep`."""
        self._strings_left -= count
        if self._strings_left < 0:
            raise Damaged(f"its arrays have more than {_STRINGS_MAX:,} strings")
        if keep and count > _STRINGS_KEPT_MAX:
            raise Damaged(f"its vocabulary has {count:,} tokens, more than {_STRINGS_KEPT_MAX:,}")
        read, unpack, left, found = self._read, _U64.unpack, self._left_bytes, []
        kept_left_bytes = _STRINGS_KEPT_BYTES
        for _ in range(count):
            head = read(8)
            if len(head) < 8 or (size := unpack(head)[0]) > (left := left - 8):
                raise self._ends("a string")
            left -= size
            if not keep:
                for at in range(0, size, _MIB):  # a long string is never read at once
                    read(min(_MIB, size - at))
            elif (kept_left_bytes := kept_left_bytes - size) < 0:
                raise Damaged(f"its vocabulary has more than {_STRINGS_KEPT_BYTES // _MIB} MiB")
            else:
                found.append(read(size))
        self._left_bytes = left
        return tuple(found)

    def _length(self) -> int:
        size = self.u64()
        self._claim(size, f"a string of {size:,} bytes")
        return size

    def _text(self, size: int) -> str:
        self._texts_left_bytes -= size
        if self._texts_left_bytes < 0:
            raise Damaged(f"it has more than {_TEXTS_MAX_BYTES // _MIB} MiB of text")
        return self._bytes(size).decode("utf-8", errors="replace")

    def _claim(self, size: int, what: str) -> None:
        if size > self._left_bytes:
            raise self._ends(what)

    def _ends(self, what: str) -> Damaged:
        if not self._is_whole:
            return Damaged(f"its header has more than {_HEADER_MAX_BYTES // _MIB} MiB ({what})")
        return Damaged(f"its header does not end: {what} do not fit into the rest of the file")

    def _bytes(self, size: int) -> bytes:
        self._claim(size, f"{size:,} bytes")
        self._left_bytes -= size
        found = self._read(size)
        if len(found) < size:  # the file was truncated meanwhile
            raise self._ends(f"{size:,} bytes")
        return found

    def _skip(self, size: int) -> None:
        self._claim(size, f"{size:,} bytes")
        for at in range(0, size, _MIB):
            self._bytes(min(_MIB, size - at))


# Each value bounds a loop or scales an amount of memory, so implausible values are rejected. The
# limits are at least eight times the largest known values; the engine has its own limits, such as
# 512 layers (LLAMA_MAX_LAYERS).

_TOKENS_MAX: Final = 2**31 - 1
LAYERS_MAX: Final = 1024

# By key, without the prefix of the architecture.
_PER_LAYER: Final = (
    "block_count attention.sliding_window_pattern attention.recurrent_layers "
    "full_attention_interval nextn_predict_layers"
)
LIMITS: Final[Mapping[str, int]] = (
    dict.fromkeys(_PER_LAYER.split(), LAYERS_MAX)
    | dict.fromkeys(("context_length", "attention.sliding_window"), _TOKENS_MAX)
    | dict.fromkeys(("shortconv.l_cache", "ssm.conv_kernel"), 1 << 10)
    | dict.fromkeys(("expert_used_count", "ssm.group_count"), 1 << 12)
    | dict.fromkeys(("attention.head_count", "attention.head_count_kv"), 1 << 14)
    | dict.fromkeys(("attention.key_length", "attention.value_length"), 1 << 16)
    | dict.fromkeys(("expert_count", "ssm.state_size"), 1 << 16)
    | {"embedding_length": 1 << 20, "ssm.inner_size": 1 << 22, "vocab_size": 1 << 24}
    | dict.fromkeys(("feed_forward_length", "expert_feed_forward_length"), 1 << 24)
)
_GENERAL: Final[Mapping[str, int]] = MappingProxyType(
    {"general.file_type": 1 << 16, "split.no": 99_999, "split.count": 99_999}
)
_BRIEF: Final = 40
# Booleans are accepted for these.
_BOOLEANS: Final = frozenset({"attention.sliding_window_pattern", "attention.recurrent_layers"})


def hyperparameter_problems(
    metadata: Mapping[str, object], lengths: Mapping[str, int]
) -> Iterator[str]:
    """Yield the problems with the hyperparameters of a file."""
    architecture = metadata.get("general.architecture")
    own = f"{architecture if isinstance(architecture, str) else ''}."
    limits = {**_GENERAL, **{own + key: limit for key, limit in LIMITS.items()}}
    layers = metadata.get(f"{own}block_count")
    for key, limit in limits.items():
        count = lengths.get(key)
        if count is not None and count > 1 and count != layers:
            yield f"{key} has {count:,} values for a block_count of {layers} (at most {ARRAY_KEPT})"
        found = metadata.get(key, ())
        for value in found if isinstance(found, tuple) else (found,):
            may_be_bool = key.removeprefix(own) in _BOOLEANS
            if not isinstance(value, int) or (isinstance(value, bool) and not may_be_bool):
                text = repr(value)
                shown = text if len(text) <= _BRIEF else f"{text[:_BRIEF]}…"
                yield f"{key} is {shown}, not an integer"
            elif not 0 <= value <= limit:
                yield f"{key} is {value}, not between 0 and {limit}"


_MAGIC: Final = b"GGUF"
_ALIGNMENT_MAX: Final = 1 << 16
# The smallest sizes of a key with its value, of a tensor and of a string.
_PAIR_MIN_BYTES: Final = 8 + 4 + 1
_TENSOR_MIN_BYTES: Final = 8 + 4 + 4 + 8
# Real models have some 50 keys and 2 000 tensors; a model with separate tensors for each expert had
# 50 000. Source: ggml.h, GGML_MAX_DIMS and, for names, GGML_MAX_NAME, 64.
_PAIRS_MAX: Final = 1 << 14
_TENSORS_MAX: Final = 1 << 16
_ARRAY_MAX: Final = 1 << 24
_DIMENSIONS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor; `offset` is in bytes from the start of the data, `shape[0]` is the row length."""

    name: str
    offset: int
    kind: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    # By key, without arrays of strings and arrays of more than 1024 elements.
    metadata: Mapping[str, Scalar | tuple[Scalar, ...]]
    lengths: Mapping[str, int]  # the number of elements of every array, by key
    tensors: tuple[Tensor, ...]
    data_at: int  # start of the tensor data, in bytes from the start of the file
    strings: tuple[bytes, ...]  # the requested array of strings; empty if none was requested

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or an array of integers; empty if missing."""
        value = self.metadata.get(key, ())
        values = value if isinstance(value, tuple) else (value,)
        return tuple(value for value in values if isinstance(value, int))

    def integer(self, key: str, default: int = 0) -> int:
        """Return an integer, or the largest of an array."""
        return max(self.integers(key), default=default)


def read(file: BinaryIO, name: str, strings_of: str = "") -> Header:
    """Read the header of an open file, with the array of strings at the key `strings_of`.

    Raises ModelInvalid: the file is empty, not GGUF, of an unsupported version, truncated, damaged
    or implausible.
    """
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    magic = file.read(len(_MAGIC))
    if not magic:
        raise ModelInvalid(f"{name} is empty", hint="download the file again")
    if magic != _MAGIC:
        raise ModelInvalid(
            f"{name} is not a GGUF file: its first bytes are {magic!r}, not b'GGUF'",
            hint="give the path of a .gguf file",
        )
    try:
        walker = Walker(file, max(0, size_bytes - len(_MAGIC)))
        version = walker.u32()
        if version not in {2, 3}:
            raise ModelInvalid(
                f"{name} has GGUF version {version}; supported are 2 and 3",
                hint="convert the model again with a current llama.cpp",
            )
        found = _header(file, walker, strings_of, size_bytes)
    except Damaged as error:
        raise ModelInvalid(
            f"{name} is truncated or damaged: {error}", hint="download the file again"
        ) from error
    if problem := next(hyperparameter_problems(found.metadata, found.lengths), None):
        raise ModelInvalid(
            f"{name} is not a valid model: {problem}", hint="download the file again"
        )
    return found


def _header(file: BinaryIO, walker: Walker, strings_of: str, size_bytes: int) -> Header:
    tensors = walker.count("tensors", most=_TENSORS_MAX, each_bytes=_TENSOR_MIN_BYTES)
    pairs = walker.count("keys", most=_PAIRS_MAX, each_bytes=_PAIR_MIN_BYTES)
    metadata: dict[str, Scalar | tuple[Scalar, ...]] = {}
    lengths: dict[str, int] = {}
    kept: tuple[bytes, ...] = ()
    value: Scalar | tuple[Scalar, ...] | None
    for _ in range(pairs):
        key, kind = walker.name("a key", 1024), walker.u32()
        if kind == ARRAY:
            value, lengths[key], strings = _array(walker, keep=key == strings_of)
            kept = strings or kept
        else:
            value = walker.value(kind)
        if value is not None:
            metadata[key] = value
    found = tuple(_tensor(walker, size_bytes) for _ in range(tensors))
    alignment = _alignment(metadata)
    data_at = -(-file.tell() // alignment) * alignment
    return Header(metadata, lengths, found, data_at, kept)


def _array(
    walker: Walker, *, keep: bool
) -> tuple[tuple[Scalar, ...] | None, int, tuple[bytes, ...]]:
    """Return the values or None if there are too many, the length, and the strings if `keep`."""
    kind = walker.u32()
    if kind == STRING:
        count = walker.count("strings", most=_ARRAY_MAX, each_bytes=8)
        return None, count, walker.strings(count, keep=keep)
    count = walker.count("values", most=_ARRAY_MAX, each_bytes=1)
    values = walker.scalars(kind, count)
    return (values if len(values) == count else None), count, ()


def _alignment(metadata: Mapping[str, object]) -> int:
    found = metadata.get("general.alignment", 32)
    if not isinstance(found, int) or not 0 < found <= _ALIGNMENT_MAX or found.bit_count() != 1:
        raise Damaged(f"general.alignment is not a power of two up to {_ALIGNMENT_MAX}")
    return found


def _tensor(walker: Walker, file_bytes: int) -> Tensor:
    name, dimensions = walker.name("the name of a tensor", 256), walker.u32()
    if dimensions > _DIMENSIONS_MAX:
        raise Damaged(f"a tensor has {dimensions:,} dimensions, more than {_DIMENSIONS_MAX}")
    shape = walker.numbers(dimensions)
    found = Tensor(name, kind=walker.u32(), offset=walker.u64(), shape=shape)
    if found.elements > 8 * file_bytes:  # no type has less than one bit per element
        raise Damaged(f"a tensor of {found.elements:,} elements is larger than the file")
    return found
