"""The header of a slot file: the tokens whose KV cache it holds.

    u32 magic   u32 version   u32 count   i32 x count: words   state

The words are the tokens; builds whose prompts may hold media write a record instead, whose end is
filled up to a whole word:

    i32 -1   u32 version   u32 count   i32 x count: tokens   u32 media   u32 x media: first token
    media x: u32 size   u8 x size: a medium, with the hash of its content

The tokens of a medium are -1. The state is opaque.

Source: llama.cpp, llama_state_seq_save_file, llama.h (LLAMA_STATE_SEQ_MAGIC) and server-common.cpp,
server_tokens::serialize; the record was read from files of build 10434.
"""

from __future__ import annotations

import array
import hashlib
import io
import struct
import sys
from collections.abc import Iterator
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
_NO_TOKEN: Final = -1
_U32: Final = struct.Struct("<I")


class NotASlotFile(ValueError):
    """The file is not a slot file of a known format."""


class InvalidSlotFile(Exception):
    """The file must not be given to an engine; the message says why."""


class SlotFileMissing(InvalidSlotFile):
    """The file was deleted, and its manifest."""


class SlotKeyMissing(InvalidSlotFile):
    """The file may be right, and its key is not at hand."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A picture or sound of a prompt."""

    at: int  # its first token
    sha256: str  # of how the engine describes it, its content's hash included


@dataclass(frozen=True, slots=True)
class SlotFileHeader:
    """The header of a slot file."""

    version: int  # of the state; a build reads only its own
    tokens: tuple[int, ...]
    media: tuple[Medium, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of the tokens as little-endian 32-bit integers, and of the media."""
        digest = hashlib.sha256(struct.pack(f"<{len(self.tokens)}i", *self.tokens))
        for one in self.media:
            digest.update(f"{one.at} {one.sha256}".encode())
        return digest.hexdigest()

    def shared_with(self, other: SlotFileHeader) -> int:
        """Return the length of the common prefix; it ends before another medium."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        differing = (at for at, (ours, its) in enumerate(pairs) if ours != its)
        shared = next(differing, min(len(self.tokens), len(other.tokens)))
        return min([shared, *(one.at for one in {*self.media} ^ {*other.media})])


def read(path: Path) -> SlotFileHeader:
    """Read the header of a slot file.

    Raises:
        NotASlotFile: It is not a slot file, or is truncated in its header.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return read_from(file)


def read_from(file: BinaryIO) -> SlotFileHeader:
    """Read the header at the start of a file; raises as `read`."""
    version, count = _head(file)
    content = _exactly(file, 4 * count)
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
    with path.open("rb") as file:
        return check_header(file, expected)


def check_header(file: BinaryIO, expected: SlotFileInfo) -> SlotFileHeader:
    """Read the header at the start of a file; raises as `read_checked`."""
    try:
        header = read_from(file)
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


def _words(content: bytes) -> tuple[int, ...]:
    words = array.array("i", content)
    if sys.byteorder == "big":
        words.byteswap()
    return tuple(words)


def _media(rest: BinaryIO, tokens: tuple[int, ...]) -> Iterator[Medium]:
    """Read the media behind the tokens."""
    begin = _words(_exactly(rest, 4 * _number(rest, _WORDS_MAX)))
    for at in begin:
        if not 0 <= at < len(tokens) or tokens[at] != _NO_TOKEN:
            raise NotASlotFile(f"a medium begins at token {at:,}, which is text")
        content = _exactly(rest, _number(rest, 4 * _WORDS_MAX))
        yield Medium(at, hashlib.sha256(content).hexdigest())
    if len(rest.read()) >= _U32.size or (_NO_TOKEN in tokens and not begin):
        raise NotASlotFile("its token record holds something unknown")


def _number(file: BinaryIO, most: int) -> int:
    (number,) = _U32.unpack(_exactly(file, _U32.size))
    if number > most:
        raise NotASlotFile("it is truncated in its header")
    return int(number)


def _exactly(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise NotASlotFile("it is truncated in its header")
    return found
