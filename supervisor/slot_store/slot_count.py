"""Slot files for engines with another number of slots.

Where each slot has a cache of its own, the state of a slot file has a part for every cache:

    u32 caches   u32 x before: 0   u32 cells   data of the cells   u32 x after: 0   recurrent state

One part holds the sequence, the others have no cells. An engine refuses a file of another number of
caches ("n_stream mismatch"), though the sequence would fit, so the empty parts are rewritten.

The recurrent state, of models that have one, begins with u32 1, i32 position, u32 0, u32 0,
u32 layers, and the type and row size of its first tensor. It is the same for any number of slots.

Source: llama.cpp, llama_kv_cache::state_write and state_read, llama_memory_hybrid::state_write,
llama_memory_recurrent::state_write; files of build 10434.
"""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.slot_store.slot_file import InvalidSlotFile, state_offset

_U32: Final = struct.Struct("<I")
_COPY_BYTES: Final = 1024**2
# One cell, its position, no sequence, not transposed, the number of layers.
_RECURRENT: Final = re.compile(rb"\x01\x00{3}.{4}\x00{8}(.{2}\x00\x00)", re.DOTALL)
_RECURRENT_HEAD_BYTES: Final = 20
_LAYER_HEAD_BYTES: Final = 24
_LAYERS_MAX: Final = 1024


def rewrite(source: Path, target: Path, *, before: int, after: int, state_bytes: int = 0) -> None:
    """Write a slot file of an engine with `before` slots for one with `after`.

    Args:
        source: The file.
        target: Where to write.
        before: Slots of the engine that wrote it, at least 1.
        after: Slots of the engine that will read it, at least 1.
        state_bytes: Of its recurrent state, without what describes it; 0 without any.

    Raises:
        InvalidSlotFile: It has no such state.
        OSError: The disk refused.
    """
    with source.open("rb") as read, target.open("xb") as write:
        target.chmod(0o600)
        head = read.read(state_offset(source))
        leading = _leading(read, before)
        begin = read.tell()
        recurrent_at = _recurrent_at(read, state_bytes)
        end = _end_of_sequence(read, recurrent_at, before - 1 - leading)
        if end <= begin:
            raise InvalidSlotFile("it holds more than one sequence")
        write.write(head + _U32.pack(after))
        _copy(read, write, begin, end)
        write.write(_U32.pack(0) * (after - 1))
        _copy(read, write, recurrent_at, read.seek(0, os.SEEK_END))


def refit(path: Path, before: int | None, after: int | None, state_bytes: int) -> None:
    """Rewrite a file in its place for another number of slots; removed where that fails.

    Raises:
        InvalidSlotFile, OSError: As `rewrite`.
    """
    if before is None or after is None or before == after:
        return
    fitting = path.with_suffix(".new")
    try:
        rewrite(path, fitting, before=before, after=after, state_bytes=state_bytes)
        fitting.replace(path)
    except (InvalidSlotFile, OSError):
        fitting.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def _leading(read: BinaryIO, before: int) -> int:
    """Read up to the sequence; return the number of empty parts before it."""
    if _number(read) != before:
        raise InvalidSlotFile(f"its state is not of {before} slots")
    for leading in range(before):
        if _number(read):
            read.seek(-_U32.size, 1)
            return leading
    raise InvalidSlotFile("it holds no sequence")


def _recurrent_at(read: BinaryIO, state_bytes: int) -> int:
    """Return where the recurrent state begins; the end of the file without one."""
    size_bytes = read.seek(0, os.SEEK_END)
    if not state_bytes:
        return size_bytes
    most = _RECURRENT_HEAD_BYTES + _LAYERS_MAX * _LAYER_HEAD_BYTES
    searched_at = max(0, size_bytes - state_bytes - most)
    read.seek(searched_at)
    for found in _RECURRENT.finditer(read.read()):
        begin, (layers,) = searched_at + found.start(), _U32.unpack(found[1])
        described_bytes = size_bytes - begin - _RECURRENT_HEAD_BYTES - state_bytes
        if 0 <= described_bytes <= layers * _LAYER_HEAD_BYTES:
            return begin
    raise InvalidSlotFile("it holds no recurrent state")


def _end_of_sequence(read: BinaryIO, end: int, trailing: int) -> int:
    """Return where the sequence ends: before the empty parts that end at `end`."""
    begin = end - _U32.size * trailing
    if begin < 0:
        raise InvalidSlotFile("it is too short")
    read.seek(begin)
    if any(read.read(end - begin)):
        raise InvalidSlotFile("it holds more than one sequence")
    return begin


def _number(read: BinaryIO) -> int:
    found = read.read(_U32.size)
    if len(found) < _U32.size:
        raise InvalidSlotFile("it is too short")
    (number,) = _U32.unpack(found)
    return int(number)


def _copy(read: BinaryIO, write: BinaryIO, begin: int, end: int) -> None:
    read.seek(begin)
    while left := end - read.tell():
        piece = read.read(min(left, _COPY_BYTES))
        if not piece:
            raise InvalidSlotFile("it became shorter while it was read")
        write.write(piece)
