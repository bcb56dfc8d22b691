"""A slot file as the router knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.prompt_cache.fingerprint import ConversationFingerprint


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
