"""The header of a slot file: the tokens whose KV cache it holds.

    u32 magic   u32 version   u32 count   i32 x count: words   state

The words are the tokens; builds whose prompts may hold images write a record instead: -1, its
version, the number of tokens, the tokens, and the number of images. The state is opaque.

Source: llama.cpp, llama_state_seq_save_file and llama.h (LLAMA_STATE_SEQ_MAGIC); the record was
read from files of build 10434.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from supervisor.engine_client.slots import SlotFileInfo

MAGIC: Final = 0x67677371
# More than any context has.
_WORDS_MAX: Final = 4 * 1024**2
_HEAD: Final = struct.Struct("<III")
_RECORD: Final = -1
_RECORD_VERSION: Final = 1


class NotASlotFile(ValueError):
    """The file is not a slot file of a known format."""


class InvalidSlotFile(Exception):
    """The file must not be given to an engine; the message says why."""


@dataclass(frozen=True, slots=True)
class SlotFileHeader:
    """The header of a slot file."""

    version: int  # of the state; a build reads only its own
    tokens: tuple[int, ...]

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokens as little-endian 32-bit integers."""
        return hashlib.sha256(struct.pack(f"<{len(self.tokens)}i", *self.tokens)).hexdigest()

    def shared_with(self, other: SlotFileHeader) -> int:
        """Return the length of the common prefix."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        differing = (at for at, (ours, its) in enumerate(pairs) if ours != its)
        return next(differing, min(len(self.tokens), len(other.tokens)))


def read(path: Path) -> SlotFileHeader:
    """Read the header of a slot file.

    Raises:
        NotASlotFile: It is not a slot file, is truncated in its header, or holds images.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        version, count = _head(file)
        words = array.array("i", _exactly(file, 4 * count))
    if sys.byteorder == "big":
        words.byteswap()
    return SlotFileHeader(version, _tokens(tuple(words)))


def state_offset(path: Path) -> int:
    """Return where the state of a slot file begins; raises as `read`."""
    with path.open("rb") as file:
        _, count = _head(file)
    return _HEAD.size + 4 * count


def read_checked(path: Path, expected: SlotFileInfo) -> SlotFileHeader:
    """Read the header of a slot file of known size and number of tokens.

    Raises:
        InvalidSlotFile: It differs from what is expected.
        OSError: It cannot be read.
    """
    if (size_bytes := path.stat().st_size) != expected.size_bytes:
        raise InvalidSlotFile(f"it has {size_bytes:,} bytes, not {expected.size_bytes:,}")
    try:
        header = read(path)
    except NotASlotFile as error:
        raise InvalidSlotFile(str(error)) from error
    if len(header.tokens) != expected.tokens:
        raise InvalidSlotFile(f"it holds {len(header.tokens):,} tokens, not {expected.tokens:,}")
    return header


def _head(file: BinaryIO) -> tuple[int, int]:
    """Read the version of the state, and the number of words."""
    magic, version, count = _HEAD.unpack(_exactly(file, _HEAD.size))
    if magic != MAGIC:
        raise NotASlotFile("it does not start like a slot file")
    if count > _WORDS_MAX:
        raise NotASlotFile(f"it claims {count:,} tokens")
    return version, count


def _tokens(words: tuple[int, ...]) -> tuple[int, ...]:
    if words[:1] != (_RECORD,):
        return words
    if words[1:2] != (_RECORD_VERSION,) or len(words) < 3:
        raise NotASlotFile("its token record has an unknown version")
    count = words[2]
    if words[3 + count :] != (0,):
        raise NotASlotFile("it holds more than text")
    return words[3 : 3 + count]


def _exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise NotASlotFile("it is truncated in its header")
    return found
