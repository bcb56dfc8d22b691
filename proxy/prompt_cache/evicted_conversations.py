"""Conversations that a cache holds no more, and how many of those that returned were gone. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

# Conversations return after minutes or hours: the last ten or so count.
_WEIGHT: Final = 0.1
# Beyond that the oldest are forgotten.
_EVICTED_MAX: Final = 4096


class EvictedConversations:
    """Those of one cache that have not returned yet.

    Attributes:
        size_bytes: That they had in all.
        absent_share: Of those that returned lately, the share that was gone; None before any has.
    """

    def __init__(self) -> None:
        self.size_bytes = 0.0
        self.absent_share: float | None = None
        self._sizes_bytes: OrderedDict[object, float] = OrderedDict()

    def __contains__(self, conversation: object) -> bool:
        return conversation in self._sizes_bytes

    def add(self, conversation: object, size_bytes: float) -> None:
        self.remove(conversation)
        self._sizes_bytes[conversation] = size_bytes
        self.size_bytes += size_bytes
        if len(self._sizes_bytes) > _EVICTED_MAX:
            self.remove(next(iter(self._sizes_bytes)))

    def remove(self, conversation: object) -> None:
        """Nothing where it is not known."""
        self.size_bytes -= self._sizes_bytes.pop(conversation, 0.0)

    def returned(self, conversation: object, expected_share: float, *, is_absent: bool) -> None:
        """Note whether one that returns is gone; `expected_share` is believed before any has."""
        before = expected_share if self.absent_share is None else self.absent_share
        self.absent_share = before + _WEIGHT * (is_absent - before)
        self.remove(conversation)
