"""Fingerprint of a saved conversation: ASCII that is kept with it and reveals none of its text."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

# Change this when prompt hashing changes; older fingerprints are then ignored.
_FORMAT: Final = "2"
_NUMBER_BYTES: Final = 8
# In place of the number of turn hashes.
_OF_BEGINNING: Final = "b"

# Scale of each LoRA adapter of a model, by its id; empty if requests choose none.
Scales = tuple[float, ...]


def scales_of(lora: object) -> Scales:
    """Return the scales in a request's `lora`; none unless it lists every adapter in order."""
    scales: list[float] = []
    for entry in lora if isinstance(lora, list) else ():
        match entry:
            case {"id": int(number), "scale": float(scale)} if number == len(scales):
                scales.append(scale)
            case _:
                return ()
    return tuple(scales)


def lora_of(scales: Iterable[float]) -> list[dict[str, float]]:
    """Return the member `lora` of a request with these scales."""
    return [{"id": number, "scale": scale} for number, scale in enumerate(scales)]


@dataclass(frozen=True, slots=True)
class ConversationFingerprint:
    """Identifies a conversation."""

    # Hashes that identify its next turn, oldest first; empty if another instance has the
    # conversation or it is unknown.
    turn_hashes: tuple[int, ...] = ()
    blocks: tuple[int, ...] = ()
    # Of the adapters that computed it. The engine does not know them: neither a slot file nor its
    # host cache has them.
    scales: Scales = ()
    # Of a beginning that conversations share: its hash, one of a prompt's `shared_hashes`. 0 for
    # others.
    beginning: int = 0

    def to_ascii(self) -> str:
        """Return ASCII text, empty if nothing is known."""
        hashes = (self.beginning,) if self.beginning else self.turn_hashes
        numbers = (*hashes, *self.blocks)
        if not numbers:
            return ""
        marks = _OF_BEGINNING if self.beginning else len(self.turn_hashes)
        packed = b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode()
        scales = f" {','.join(map(repr, self.scales))}" if self.scales else ""
        return f"{_FORMAT} {marks} {packed}{scales}"


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot that was filled from a file before its process took requests."""

    id_slot: int
    task: int = -1  # Number of its last task, -1 for none; while it is unchanged, so is the content
    tokens: int = 0
    fingerprint: ConversationFingerprint = ConversationFingerprint()


def decode_fingerprint(word: str) -> ConversationFingerprint:
    """Return an empty fingerprint if the text is foreign or altered."""
    with suppress(ValueError, struct.error):
        known, marks, packed, *rest = word.split(" ")
        scales = tuple(map(float, rest[0].split(","))) if rest else ()
        raw = b64decode(packed, validate=True)
        numbers = struct.unpack(f"<{len(raw) // _NUMBER_BYTES}Q", raw)
        count = 1 if marks == _OF_BEGINNING else int(marks)
        if known == _FORMAT and len(rest) <= 1 and 0 <= count <= len(numbers):
            hashes, blocks = numbers[:count], numbers[count:]
            if marks == _OF_BEGINNING:
                return ConversationFingerprint((), blocks, scales, hashes[0])
            return ConversationFingerprint(hashes, blocks, scales)
    return ConversationFingerprint()


@dataclass(frozen=True, slots=True)
class SlotFile:
    """The KV cache of a conversation, or of a prefix that conversations share, on disk."""

    name: str  # Unique among all files; opaque.
    cache_key: str  # Engines whose upstream has the same key can restore the file.
    tokens: int  # Tokens in the file, at least 1.
    size_bytes: int
    # Fingerprint of its conversation; no turn hashes: a prefix, or a prompt that no conversation
    # continues.
    fingerprint: ConversationFingerprint = field(repr=False)
    # Only a prompt that continues the whole file can use it; also True for a full sliding window.
    is_recurrent: bool = False
