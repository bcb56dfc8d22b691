"""Which holders can go on from which whole prompts: those of recurrent models. Pure.

Their state cannot be cut back, so only the end of a prompt counts, and only that of the latest
prompts of a conversation. Bounded: the ends used least recently go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PromptEnds:
    """At most `ends_max` ends of prompts; holders are bits of a number."""

    def __init__(self, ends_max: int) -> None:
        self._ends_max = ends_max
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def levels(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Return numbers of blocks from the start, each with those that have an end there."""
        if not self._holders:
            return []
        found = ((at, self._holders.get(block, 0)) for at, block in enumerate(blocks, 1))
        return [(at, holders) for at, holders in found if holders]

    def add(self, blocks: Sequence[int], holder: int, kept: int) -> None:
        """Note that a holder has a prompt, and of those that it continues the last `kept` - 1."""
        before = [one for one in blocks[:-1] if self._holders.get(one, 0) & holder]
        for end in before[: max(0, len(before) - kept + 1)]:
            self._holders[end] &= ~holder
        for end in blocks[-1:]:
            self._holders[end] = self._holders.get(end, 0) | holder
            self._holders.move_to_end(end)
        while len(self._holders) > self._ends_max:
            self._holders.popitem(last=False)

    def remove(self, holders: int) -> None:
        """Forget all that these have."""
        for end, of_end in tuple(self._holders.items()):
            if left := of_end & ~holders:
                self._holders[end] = left
            else:
                del self._holders[end]
