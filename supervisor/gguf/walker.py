"""Reads the values of a GGUF header, never more than the file can hold."""

from __future__ import annotations

import struct
from typing import BinaryIO, Final

# A header is untrusted. Every count is compared with the bytes left in the file before anything is
# read or allocated, and their totals with the needs of the largest real models, so that reading any
# file costs about a second and some tens of MB at most.
#
# Source: docs/gguf.md of ggml; ggml/src/gguf.cpp for the limits of names, dimensions and alignment.

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
# Strings of the array that is kept, a vocabulary, and their bytes: each costs some 80 in memory.
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
    """Reads from the position of an open file, which has `size_bytes` left."""

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
        """Read 64-bit numbers."""
        return struct.unpack(f"<{count}Q", self._bytes(8 * count))

    def count(self, what: str, *, most: int, each_bytes: int) -> int:
        """Read the count of the items that follow, each of which takes `each_bytes` at least.

        Raises:
            Damaged: The file cannot hold them, or they are too many.
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
        code = self._format(kind)
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
                for at in range(0, size, _MIB):  # never all of a long one
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

    @staticmethod
    def _format(kind: int) -> str:
        if kind not in _FORMATS:
            raise Damaged(f"its header has a value of the unknown type {kind}")
        return _FORMATS[kind]

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
        if len(found) < size:  # truncated while it is read
            raise self._ends(f"{size:,} bytes")
        return found

    def _skip(self, size: int) -> None:
        self._claim(size, f"{size:,} bytes")
        for at in range(0, size, _MIB):
            self._bytes(min(_MIB, size - at))
