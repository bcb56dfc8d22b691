"""What a conversation is known by while nobody has it in a cache: as a word, and read again. Pure.

Whoever saves what a slot holds keeps the word with it, and hands it back when an instance begins
with that. The word tells nothing of what was said.
"""

from __future__ import annotations

import binascii
import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Final

# Another way of hashing prompts is another format: words of the one before say nothing then.
_FORMAT: Final = "1"
_NUMBER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """What tells a conversation from others.

    Attributes:
        turn_hashes: By which its next turn is known, the oldest first; none where it is known
            elsewhere, or not at all.
        blocks: Those of its last prompt.
    """

    turn_hashes: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()

    @property
    def encoded(self) -> str:
        """Return it as ASCII; empty where there is nothing to tell."""
        numbers = (*self.turn_hashes, *self.blocks)
        if not numbers:
            return ""
        packed = b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode()
        return f"{_FORMAT} {len(self.turn_hashes)} {packed}"


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot as an instance begins with it.

    Attributes:
        id_slot: Its number.
        task: The number of its last task, -1 for none: while that stays so, it holds the same.
        tokens: How many it holds.
        fingerprint: What tells the conversation in it.
    """

    id_slot: int
    task: int = -1
    tokens: int = 0
    fingerprint: ConversationFingerprint = ConversationFingerprint()


def decode_fingerprint(word: str) -> ConversationFingerprint:
    """Return what a word tells: nothing, where it is none of ours or was altered."""
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
