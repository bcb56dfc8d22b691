"""The format of llama-server's slot files: header, tokens, and another number of slots.

The header has the tokens of the KV cache:

    u32 magic   u32 version   u32 count   i32 x count: words   state

The words are the tokens. Builds whose prompts may hold media write a record instead, padded to a
whole word:

    i32 -1   u32 version   u32 count   i32 x count: tokens   u32 media   u32 x media: first token
    media x: u32 size   u8 x size: a medium, with the hash of its content

The tokens of a medium are -1. If each slot has a cache of its own, the state has a part for every
cache; otherwise it is opaque:

    u32 caches   u32 x before: 0   u32 cells   data of the cells   u32 x after: 0   recurrent state

One part holds the sequence, the others have no cells. An engine refuses a file with another number
of caches ("n_stream mismatch"), although the sequence would fit, so the empty parts are rewritten.

The recurrent state, of models that have one, begins with u32 1, i32 position, u32 0, u32 0, u32
layers, and the type and row size of its first tensor. It does not depend on the number of slots.

A model with a sliding window has two such caches, one after the other: that of the layers without a
window, and that of the layers with one, which has the latest cells only. The data of `n` cells are

    n x (i32 position   u32 1   u32 slot)   u32 transposed   u32 layers
    layers x (i32 type   u64 row size   u8 x n x row size: keys)     and the same for the values

Newer builds write two more numbers after the layers, and some models 8 or 12 more bytes for each
cell. Transposed values (without flash attention) are

    layers x (i32 type   u32 value size   u32 rows   u8 x rows x n x value size)

An engine continues a prompt at position `p` only if the window's cache begins before `p - window`,
and it writes the cells from there on, one too few: so it would use nothing of its own file.
`extend_window` adds the missing cell. No later token attends to it, because it lies outside of the
window of all of them, so its content does not matter.

Source: llama.cpp, server_context::update_slots (pos_min_thold), llama_kv_cache_iswa::state_write,
llama_hparams::is_masked_swa; measured on build 10434: 790 of 790 tokens found, 0 without the cell.

Source: llama.cpp, llama_state_seq_save_file, llama.h (LLAMA_STATE_SEQ_MAGIC), server-common.cpp,
server_tokens::serialize, llama_kv_cache::state_write and state_read,
llama_memory_hybrid::state_write, llama_memory_recurrent::state_write; files of build 10434.
"""

from __future__ import annotations

import array
import hashlib
import io
import itertools
import os
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from supervisor.engine.client import SlotFileInfo

MAGIC: Final = 0x67677371
# More words than any context has.
_WORDS_MAX: Final = 4 * 1024**2
_HEAD: Final = struct.Struct("<III")
_RECORD: Final = -1
_RECORD_VERSION: Final = 1
_NO_TOKEN: Final = -1
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")


class NotASlotFile(ValueError): ...


class InvalidSlotFile(Exception):
    """The file must not be given to an engine; the message says why."""


class ReadGivenUp(OSError):
    """A shared directory was much slower than before."""


class SlotFileMissing(InvalidSlotFile):
    """The file and its manifest were deleted."""


class SlotKeyMissing(InvalidSlotFile):
    """The key of the file is not in the key file."""


# A picture or sound of a prompt: its first token, and the SHA-256 of its description by the engine,
# which includes a hash of its content.
Medium = tuple[int, str]


@dataclass(frozen=True, slots=True)
class SlotFileHeader:
    version: int  # of the state; a build reads only its own
    tokens: tuple[int, ...]
    media: tuple[Medium, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokens as little-endian 32-bit integers, and of the media."""
        digest = hashlib.sha256(struct.pack(f"<{len(self.tokens)}i", *self.tokens))
        for at, sha256 in self.media:
            digest.update(f"{at} {sha256}".encode())
        return digest.hexdigest()

    def shared_with(self, other: SlotFileHeader) -> int:
        """Return the length of the common prefix in tokens; it ends before a different medium."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        differing = (at for at, (ours, its) in enumerate(pairs) if ours != its)
        shared = next(differing, min(len(self.tokens), len(other.tokens)))
        return min([shared, *(at for at, _ in {*self.media} ^ {*other.media})])


def read(file: BinaryIO) -> SlotFileHeader:
    """Read the header at the start of a file. Raises NotASlotFile, also if it is truncated."""
    version, count = _head(file)
    content = _read_exactly(file, 4 * count)
    words = _words(content)
    if words[:1] != (_RECORD,):
        return SlotFileHeader(version, words)
    if words[1:2] != (_RECORD_VERSION,) or count < 3:
        raise NotASlotFile("its token record has an unknown version")
    if not 0 <= words[2] <= count - 3:
        raise NotASlotFile("it is truncated in its header")
    tokens = words[3 : 3 + words[2]]
    media = tuple(_media(io.BytesIO(content[4 * (3 + len(tokens)) :]), tokens))
    return SlotFileHeader(version, tokens, media)


def state_offset(path: Path) -> int:
    """Return the offset of the state in a slot file; raises as `read`, and OSError."""
    with path.open("rb") as file:
        _, count = _head(file)
    return _HEAD.size + 4 * count


def read_checked(path: Path, expected: SlotFileInfo) -> SlotFileHeader:
    """Read the header of a slot file. Raises OSError, and InvalidSlotFile: other size or tokens."""
    check_size(path, expected.size_bytes)
    with path.open("rb") as file:
        return check_header(file, expected)


def check_size(path: Path, expected_bytes: int) -> None:
    """Check the size of a file; raises as `read_checked`."""
    if (size_bytes := path.stat().st_size) != expected_bytes:
        raise InvalidSlotFile(f"it has {size_bytes:,} bytes, not {expected_bytes:,}")


def check_header(file: BinaryIO, expected: SlotFileInfo) -> SlotFileHeader:
    """Read the header at the start of a file; raises as `read_checked`."""
    try:
        header = read(file)
    except NotASlotFile as error:
        raise InvalidSlotFile(str(error)) from error
    if len(header.tokens) != expected.tokens:
        raise InvalidSlotFile(f"it holds {len(header.tokens):,} tokens, not {expected.tokens:,}")
    return header


def _head(file: BinaryIO) -> tuple[int, int]:
    magic, version, count = _HEAD.unpack(_read_exactly(file, _HEAD.size))
    if magic != MAGIC:
        raise NotASlotFile("it does not start like a slot file")
    if count > _WORDS_MAX:
        raise NotASlotFile(f"it claims {count:,} tokens")
    return version, count


def _words(content: bytes) -> tuple[int, ...]:
    words = array.array("i", content)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


def _media(rest: BinaryIO, tokens: tuple[int, ...]) -> Iterator[Medium]:
    begin = _words(_read_exactly(rest, 4 * _number(rest, _WORDS_MAX)))
    for at in begin:
        if not 0 <= at < len(tokens) or tokens[at] != _NO_TOKEN:
            raise NotASlotFile(f"a medium begins at token {at:,}, which is text")
        yield at, hashlib.sha256(_read_exactly(rest, _number(rest, 4 * _WORDS_MAX))).hexdigest()
    if len(rest.read()) >= _U32.size or (_NO_TOKEN in tokens and not begin):
        raise NotASlotFile("its token record holds something unknown")


def _number(file: BinaryIO, most: int) -> int:
    (number,) = _U32.unpack(_read_exactly(file, _U32.size))
    if number > most:
        raise NotASlotFile("it is truncated in its header")
    return int(number)


def _read_exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise NotASlotFile("it is truncated in its header")
    return found


_COPY_BYTES: Final = 1024**2
# The head of a recurrent state: one cell, its position, no sequence, not transposed, the layers.
_RECURRENT: Final = re.compile(rb"\x01\x00{3}.{4}\x00{8}(.{2}\x00\x00)", re.DOTALL)
_RECURRENT_HEAD_BYTES: Final = 20
_LAYER_HEAD_BYTES: Final = 24
_LAYERS_MAX: Final = 1024
_SLOTS_MAX: Final = 1024
_ITEM_MAX_BYTES: Final = 2**24
# Sizes of the description of a cell, and of the numbers before the tensors, in known builds.
_CELL_BYTES: Final = (12, 20, 24)
_DATA_HEAD_BYTES: Final = (8, 16)


def rewrite(
    source: Path,
    target: Path,
    *,
    before: int,
    after: int,
    state_bytes: int = 0,
    has_window: bool = False,
) -> None:
    """Rewrite a slot file of an engine with `before` slots into `target`, for one with `after`.

    Both numbers are at least 1. `state_bytes` is the size of the recurrent state without its head,
    0 if the model has none; `has_window`: it may have two caches. Raises InvalidSlotFile: it has no
    such state; OSError: the disk refused.
    """
    with source.open("rb") as read, target.open("xb") as write:
        target.chmod(0o600)
        head = read.read(state_offset(source))
        size_bytes = read.seek(0, os.SEEK_END)
        if has_window:
            caches, rest_at = _caches(read, len(head)), size_bytes
            sequences = [(cache.begin, cache.end) for cache in caches]
        else:
            rest_at = _recurrent_at(read, state_bytes)
            read.seek(len(head))
            leading = _count_empty_parts(read, before)
            begin = read.tell()
            sequences = [(begin, _end_of_sequence(read, rest_at, before - 1 - leading))]
        write.write(head)
        for begin, end in sequences:
            if end <= begin:
                raise InvalidSlotFile("it holds more than one sequence")
            write.write(_U32.pack(after))
            _copy(read, write, begin, end)
            write.write(_U32.pack(0) * (after - 1))
        _copy(read, write, rest_at, size_bytes)


def refit(
    path: Path, before: int | None, after: int | None, state_bytes: int, *, has_window: bool
) -> None:
    """Rewrite a file in place for other slots, or delete it. Raises InvalidSlotFile, OSError."""
    if before is None or after is None or before == after:
        return
    fitting = path.with_suffix(".new")
    try:
        rewrite(
            path,
            fitting,
            before=before,
            after=after,
            state_bytes=state_bytes,
            has_window=has_window,
        )
        fitting.replace(path)
    except (InvalidSlotFile, OSError):
        fitting.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise


def extend_window(path: Path) -> None:
    """Add the cell before the window in place, with which an engine uses the file.

    A file that is not longer than the window stays as it is. Raises OSError, and InvalidSlotFile:
    it has no two caches.
    """
    with path.open("r+b") as file:
        *others, cache = _caches(file, state_offset(path))
        if not others:
            raise InvalidSlotFile("it has no cache of a window")
        file.seek(cache.begin)
        content = file.read()
        described = range(_U32.size, _U32.size + cache.cells * cache.cell_bytes, cache.cell_bytes)
        positions = [_I32.unpack_from(content, at)[0] for at in described]
        first = min(positions)
        if first == 0 or max(positions) - first >= cache.cells:
            return
        copied, at = positions.index(first), _U32.size
        added = content[described[copied] + _I32.size :][: cache.cell_bytes - _I32.size]
        pieces = [_U32.pack(cache.cells + 1), _I32.pack(first - 1), added]
        for tensor in cache.tensors:
            row_bytes = cache.cells * tensor.item_bytes
            for row in range(tensor.rows):
                begin = tensor.begin - cache.begin + row * row_bytes
                item = begin + copied * tensor.item_bytes
                pieces += [content[at:begin], content[item : item + tensor.item_bytes]]
                at = begin
        file.seek(cache.begin)
        file.write(b"".join([*pieces, content[at:]]))


class _Tensor(NamedTuple):
    begin: int  # offset in the file
    item_bytes: int  # size of a cell in each row
    rows: int


class _Cache(NamedTuple):
    """The cells of a sequence in one cache; offsets are those in the file."""

    begin: int  # of their number
    end: int
    cells: int
    cell_bytes: int  # size of the description of a cell
    tensors: tuple[_Tensor, ...]


def _caches(read: BinaryIO, begin: int) -> list[_Cache]:
    """Return the caches in a file: two with a window, otherwise one. Raises InvalidSlotFile."""
    size_bytes = read.seek(0, os.SEEK_END)
    for cell_bytes, head_bytes in itertools.product(_CELL_BYTES, _DATA_HEAD_BYTES):
        with suppress(InvalidSlotFile):
            read.seek(begin)
            caches = [_cache(read, cell_bytes, head_bytes)]
            if read.tell() < size_bytes:
                caches.append(_cache(read, cell_bytes, head_bytes))
            if read.tell() == size_bytes:
                return caches
    raise InvalidSlotFile("its state has an unknown layout")


def _cache(read: BinaryIO, cell_bytes: int, head_bytes: int) -> _Cache:
    """Read the parts of one cache, of which one has cells; raises InvalidSlotFile."""
    found = None
    for _ in range(_read_u32(read, _SLOTS_MAX)):
        begin = read.tell()
        if cells := _read_u32(read, _WORDS_MAX):
            if found:
                raise InvalidSlotFile("it holds more than one sequence")
            read.seek(cells * cell_bytes, os.SEEK_CUR)
            is_transposed, layers = _read_u32(read, 1), _read_u32(read, _LAYERS_MAX)
            read.seek(head_bytes - 2 * _U32.size, os.SEEK_CUR)
            kinds = [*itertools.repeat(0, layers), *itertools.repeat(is_transposed, layers)]
            tensors = tuple(_tensor(read, cells, kind) for kind in kinds)
            found = _Cache(begin, read.tell(), cells, cell_bytes, tensors)
    if found is None:
        raise InvalidSlotFile("it holds no sequence")
    return found


def _tensor(read: BinaryIO, cells: int, is_transposed: int) -> _Tensor:
    _read_u32(read)  # the type
    item_bytes, rows = _read_u32(read, _ITEM_MAX_BYTES), _read_u32(read, _ITEM_MAX_BYTES)
    if not is_transposed:
        if rows:  # the upper half of the row size
            raise InvalidSlotFile("its state has an unknown layout")
        rows = 1
    tensor = _Tensor(read.tell(), item_bytes, rows)
    read.seek(rows * cells * item_bytes, os.SEEK_CUR)
    return tensor


def _count_empty_parts(read: BinaryIO, before: int) -> int:
    """Read the empty parts before the sequence; return their number."""
    if _read_u32(read) != before:
        raise InvalidSlotFile(f"its state is not of {before} slots")
    for leading in range(before):
        if _read_u32(read):
            read.seek(-_U32.size, 1)
            return leading
    raise InvalidSlotFile("it holds no sequence")


def _recurrent_at(read: BinaryIO, state_bytes: int) -> int:
    """Return the offset of the recurrent state; the end of the file if there is none."""
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
    """Return the offset of the end of the sequence: before the empty parts that end at `end`."""
    begin = end - _U32.size * trailing
    if begin < 0:
        raise InvalidSlotFile("it is too short")
    read.seek(begin)
    if any(read.read(end - begin)):
        raise InvalidSlotFile("it holds more than one sequence")
    return begin


def _read_u32(read: BinaryIO, most: int = 2**32) -> int:
    found = read.read(_U32.size)
    if len(found) < _U32.size:
        raise InvalidSlotFile("it is too short")
    (number,) = _U32.unpack(found)
    if number > most:
        raise InvalidSlotFile("its state has an unknown layout")
    return int(number)


def _copy(read: BinaryIO, write: BinaryIO, begin: int, end: int) -> None:
    """Append a part of a file to another, in the kernel if its file system can."""
    write.flush()
    with suppress(AttributeError, OSError):  # other systems; if the disk is full, the loop raises
        while begin < end and (
            count := os.copy_file_range(read.fileno(), write.fileno(), end - begin, begin)
        ):
            begin += count
    write.seek(0, os.SEEK_END)
    read.seek(begin)
    while left := end - read.tell():
        piece = read.read(min(left, _COPY_BYTES))
        if not piece:
            raise InvalidSlotFile("it became shorter while it was read")
        write.write(piece)
