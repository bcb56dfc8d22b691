"""How much of what is held in a cache a prompt begins with. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from proxy.prompt_cache.prompt import BLOCK_TOKENS


class Held(Protocol):
    """What a slot holds: `TrackedSlot` or `SlotContent`."""

    @property
    def conversation(self) -> object | None: ...
    @property
    def tokens(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...


class Match(NamedTuple):
    """The share of what is held that a prompt begins with, and its tokens."""

    kept: float
    tokens: int


NONE: Final = Match(0.0, 0)


def match(held: Held, conversation: object | None, blocks: Sequence[int]) -> Match:
    is_own = conversation is not None and held.conversation == conversation
    if is_own and continues(blocks, held.blocks):
        return Match(1.0, held.tokens)
    if not (shared_blocks := _shared_blocks(held.blocks, blocks)):
        return NONE
    # Half of the next block is shared on average; more by an edited conversation than by those
    # that only begin like it.
    part = BLOCK_TOKENS - 1 if is_own else BLOCK_TOKENS // 2
    shared = min(held.tokens, shared_blocks * BLOCK_TOKENS + part)
    return Match(shared / max(1, held.tokens), shared)


def continues(blocks: Sequence[int], before: Sequence[int]) -> bool:
    return len(before) <= len(blocks) and (not before or blocks[len(before) - 1] == before[-1])


def _shared_blocks(ours: Sequence[int], others: Sequence[int]) -> int:
    """Return how many blocks two prompts share: each hash includes all before it."""
    if not ours or not others or ours[0] != others[0]:
        return 0
    least = min(len(ours), len(others))
    return bisect_left(range(least), 1, key=lambda at: ours[at] != others[at])
