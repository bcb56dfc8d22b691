"""Reads the head of a slot file: which tokens the cache in it is of.

    u32 magic   u32 version   u32 count   i32 x count: the words   …the state

The words are the tokens themselves, or, in builds whose prompts may hold pictures, a record of
them: -1, its version, how many tokens, these, and how many pictures follow. We read what we must
know and leave the state to the engine.

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

MAGIC: Final = 0x67677371
# A million tokens are more than any context; a file that claims more is none.
_WORDS_MAX: Final = 4 * 1024**2
_HEAD: Final = struct.Struct("<III")
_RECORD: Final = -1
_RECORD_VERSION: Final = 1


class NotASlotFile(ValueError):
    """What is there is no slot file, or one that we do not understand."""


@dataclass(frozen=True, slots=True)
class SlotFileHeader:
    """The head of a slot file.

    Attributes:
        version: Of the state's format; builds refuse others than their own.
        tokens: The tokens of the conversation, in the model's own numbers.
    """

    version: int
    tokens: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the tokens, as little-endian 32-bit numbers."""
        return hashlib.sha256(struct.pack(f"<{len(self.tokens)}i", *self.tokens)).hexdigest()

    def shared_with(self, other: SlotFileHeader) -> int:
        """Return how many tokens both begin with."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        differing = (at for at, (ours, its) in enumerate(pairs) if ours != its)
        return next(differing, min(len(self.tokens), len(other.tokens)))


def read(path: Path) -> SlotFileHeader:
    """Return the head of a slot file.

    Raises:
        NotASlotFile: It is none, or cut short within its head, or holds pictures.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        magic, version, count = _HEAD.unpack(_exactly(file, _HEAD.size))
        if magic != MAGIC:
            raise NotASlotFile("it does not begin as a slot file does")
        if count > _WORDS_MAX:
            raise NotASlotFile(f"it claims {count:,} tokens")
        words = array.array("i", _exactly(file, 4 * count))
    if sys.byteorder == "big":
        words.byteswap()
    return SlotFileHeader(version, _tokens(tuple(words)))


def _tokens(words: tuple[int, ...]) -> tuple[int, ...]:
    if words[:1] != (_RECORD,):
        return words
    if words[1:2] != (_RECORD_VERSION,) or len(words) < 3:
        raise NotASlotFile("its record of tokens is of a kind we do not know")
    count = words[2]
    if words[3 + count :] != (0,):
        raise NotASlotFile("it holds more than text")
    return words[3 : 3 + count]


def _exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise NotASlotFile("it is cut short within its head")
    return found
