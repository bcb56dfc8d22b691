"""Slot files for engines with another number of slots.

Where each slot has a cache of its own, the state of a slot file has a part for every cache:

    u32 caches   u32 x before: 0   u32 cells   data of the cells   u32 x after: 0

One part holds the sequence, the others have no cells. An engine refuses a file of another number of
caches ("n_stream mismatch"), though the sequence would fit, so the empty parts are rewritten.

Source: llama.cpp, llama_kv_cache::state_write and state_read; files of build 10434.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.slot_store.slot_file import InvalidSlotFile, state_offset

_U32: Final = struct.Struct("<I")
_COPY_BYTES: Final = 1024**2


def rewrite(source: Path, target: Path, *, before: int, after: int) -> None:
    """Write a slot file of an engine with `before` slots for one with `after`.

    Raises:
        InvalidSlotFile: It has no such state.
        OSError: The disk refused.
    """
    with source.open("rb") as read, target.open("xb") as write:
        target.chmod(0o600)
        head = read.read(state_offset(source))
        leading = _leading(read, before)
        sequence_bytes = _sequence_bytes(read, before - 1 - leading)
        write.write(head + _U32.pack(after))
        _copy(read, write, sequence_bytes)
        write.write(_U32.pack(0) * (after - 1))


def _leading(read: BinaryIO, before: int) -> int:
    """Read up to the sequence; return the number of empty parts before it."""
    if _number(read) != before:
        raise InvalidSlotFile(f"its state is not of {before} slots")
    for leading in range(before):
        if _number(read):
            read.seek(-_U32.size, 1)
            return leading
    raise InvalidSlotFile("it holds no sequence")


def _sequence_bytes(read: BinaryIO, trailing: int) -> int:
    """Return the bytes from here up to the empty parts at the end."""
    begin = read.tell()
    try:
        end = read.seek(-_U32.size * trailing, 2)
    except OSError as error:
        raise InvalidSlotFile("it is too short") from error
    if end <= begin or any(read.read()):
        raise InvalidSlotFile("it holds more than one sequence")
    read.seek(begin)
    return end - begin


def _number(read: BinaryIO) -> int:
    found = read.read(_U32.size)
    if len(found) < _U32.size:
        raise InvalidSlotFile("it is too short")
    (number,) = _U32.unpack(found)
    return int(number)


def _copy(read: BinaryIO, write: BinaryIO, count: int) -> None:
    while count:
        piece = read.read(min(count, _COPY_BYTES))
        if not piece:
            raise InvalidSlotFile("it became shorter while it was read")
        write.write(piece)
        count -= len(piece)
