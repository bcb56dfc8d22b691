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


class PromptMatcher:
    """Compares one prompt with much that is held; its conversation is None for a new one."""

    def __init__(self, conversation: object | None, blocks: Sequence[int]) -> None:
        self._conversation = conversation
        self._blocks = blocks
        self._shared = 0  # by most of what was compared last: they share a system prompt

    def match(self, held: Held) -> Match:
        is_own = self._conversation is not None and held.conversation == self._conversation
        if is_own and continues(self._blocks, held.blocks):
            return Match(1.0, held.tokens)
        if not (shared_blocks := self._shared_blocks(held.blocks)):
            return NONE
        # Half of the next block is shared on average; more by an edited conversation than by those
        # that only begin like it.
        part = BLOCK_TOKENS - 1 if is_own else BLOCK_TOKENS // 2
        shared = min(held.tokens, shared_blocks * BLOCK_TOKENS + part)
        return Match(shared / max(1, held.tokens), shared)

    def _shared_blocks(self, others: Sequence[int]) -> int:
        """Return how many blocks are shared: each hash includes all before it."""
        ours, shared = self._blocks, self._shared
        if not ours or not others or ours[0] != others[0]:
            return 0
        least = min(len(ours), len(others))
        is_guessed = 0 < shared < least and ours[shared - 1] == others[shared - 1]
        if not is_guessed or ours[shared] == others[shared]:
            differs = range(least)
            shared = bisect_left(differs, 1, key=lambda at: ours[at] != others[at])
            self._shared = shared
        return shared


def continues(blocks: Sequence[int], before: Sequence[int]) -> bool:
    """Return whether a prompt begins with all of another one."""
    return len(before) <= len(blocks) and (not before or blocks[len(before) - 1] == before[-1])
