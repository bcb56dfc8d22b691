"""What identifies a saved conversation, as ASCII to keep with it, and its slot file.

It reveals nothing of the text.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Final

# Another way of hashing prompts is another format: words of the one before say nothing then.
_FORMAT: Final = "2"
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """Identifies a conversation.

    Attributes:
        turn_hashes: Which identify its next turn, the oldest first; none where another instance has
            it, or it is not known.
        blocks: Of its last prompt.
    """

    turn_hashes: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def encoded(self) -> str:
        """As ASCII; empty where nothing is known."""
        numbers = (*self.turn_hashes, *self.blocks)
        if not numbers:
            return ""
        packed = b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode()
        return f"{_FORMAT} {len(self.turn_hashes)} {packed}"


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot as a process began with it.

    Attributes:
        task: The number of its last task, -1 for none: while that stays so, it holds the same.
        tokens: That it holds.
    """

    id_slot: int
    task: int = -1
    tokens: int = 0
    fingerprint: ConversationFingerprint = ConversationFingerprint()


def decode_fingerprint(word: str) -> ConversationFingerprint:
    """Return an empty fingerprint where the text is not ours or was altered."""
    try:
        known, marks, packed = word.split(" ")
        raw = b64decode(packed, validate=True)
        numbers = struct.unpack(f"<{len(raw) // _NUMBER_BYTES}Q", raw)
        count = int(marks)
    except (ValueError, binascii.Error, struct.error):
        return ConversationFingerprint()
    if known != _FORMAT or not 0 <= count <= len(numbers):
        return ConversationFingerprint()
    return ConversationFingerprint(numbers[:count], numbers[count:])


@dataclass(frozen=True, slots=True)
class SlotFile:
    """The KV cache of a conversation, or of a prefix that conversations share, on disk.

    Attributes:
        name: Unique among all files; opaque.
        cache_key: Which engines can restore it: those whose upstream has the same.
        tokens: That it holds, at least 1.
        fingerprint: Of its conversation; without turn hashes it is a prefix or a prompt that no
            conversation continues.
        is_recurrent: Only a prompt that continues all of it finds anything in it. So it is for a
            full sliding window, too.
    """

    name: str
    cache_key: str
    tokens: int
    size_bytes: int
    fingerprint: ConversationFingerprint = field(repr=False)
    is_recurrent: bool = False
