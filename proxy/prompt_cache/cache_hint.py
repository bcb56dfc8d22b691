"""What is believed of the caches for one prompt, as tokens with those that hold them. Pure.

Tokens are estimated as those of prompts are. Instances are bits of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.prompt_cache.conversations import Conversation

Levels = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What is believed of the caches for one prompt at one moment.

    Attributes:
        owner: The instance that has the conversation, or None.
        cached: Tokens of the prompt, each number with the set of instances that hold so many, the
            most first; an instance is in one set at most. A file counts for all that can restore
            it, less what could be computed meanwhile.
        held: The same without files.
        saved: Of files alone.
        conversation: None for a new one.
    """

    owner: str | None = None
    cached: Levels = ()
    held: Levels = ()
    saved: Levels = ()
    conversation: Conversation | None = None

    def cached_tokens(self, instances: int) -> int:
        """Return the most tokens of the prompt that one of a set of instances holds."""
        return most_tokens(self.cached, instances)

    def held_tokens(self, instances: int) -> int:
        """Return the same without files."""
        return most_tokens(self.held, instances)

    def saved_tokens(self, instances: int) -> int:
        """Return what a file is worth to one of a set of instances."""
        return most_tokens(self.saved, instances)


NO_HINT: Final = CacheHint()


def most_tokens(levels: Levels, instances: int) -> int:
    return next((tokens for tokens, holders in levels if holders & instances), 0)


def at_most(levels: Levels, some: int, tokens_max: int) -> list[tuple[int, int]]:
    """Return tokens with those that hold them, where some hold `tokens_max` at most."""
    found = []
    for tokens, holders in levels:
        found.append((tokens, holders & ~some if tokens > tokens_max else holders))
        if tokens > tokens_max:
            found.append((tokens_max, holders & some))
    return sorted(
        ((tokens, holders) for tokens, holders in found if tokens and holders), reverse=True
    )


def best_of(one: Levels, other: Levels) -> list[tuple[int, int]]:
    """Return the more that each instance has by one of two lists."""
    found, seen = [], 0
    for tokens, holders in sorted((*one, *other), reverse=True):
        if some := holders & ~seen:
            found.append((tokens, some))
        seen |= holders
    return found
