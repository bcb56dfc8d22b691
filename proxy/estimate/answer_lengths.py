"""How many tokens the answers of a model have. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

_SAMPLES_MAX: Final = 64
# Before the first answer.
_TOKENS: Final = 128.0


class AnswerLengths:
    """The latest answers of a model, each with its limit."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque(maxlen=_SAMPLES_MAX)

    def note(self, decoded_tokens: int, limit: int | None) -> None:
        """Take a complete answer; one that its limit ended would have been longer."""
        is_cut = limit is not None and decoded_tokens >= limit
        self._lengths.append(math.inf if is_cut else decoded_tokens)

    def expected(self, limit: int | None, decoded_tokens: int = 0) -> float:
        """Return how many more tokens an answer has: the median of those that got as far."""
        longer = [one for one in self._lengths if one > decoded_tokens]
        # An answer longer than all known ones goes on for half as long again.
        length = median(longer) if longer else max(_TOKENS, 1.5 * decoded_tokens)
        if length == math.inf and limit is None:
            length = max(_TOKENS, 1.5 * decoded_tokens)
        return max(1.0, min(length, math.inf if limit is None else limit) - decoded_tokens)
