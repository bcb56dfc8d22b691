"""How many tokens a prompt has, and how many of them an engine computes. Pure.

Only the length of a prompt is known, of which a tokenizer and a template make more or fewer tokens.
What is to be computed is learned apart from the whole: as a difference of two large numbers it
would be nothing but their errors.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from proxy.estimate.least_squares import LeastSquares
from proxy.upstream.timings import Timings

# A template is worth as much as 32 tokens; else there are as many as estimated.
_SCALES: Final = (1 / 32, 1.0)
_ASSUMED: Final = (0.0, 1.0)
_HITS_MAX: Final = 16
_EXPECTED_MIN_TOKENS: Final = 64
_HIT: Final = 0.5
_GROWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class PromptLength:
    """A prompt by its length.

    Attributes:
        tokens: Estimated from its bytes.
        cached: Of these, those that a cache is believed to hold.
    """

    tokens: int
    cached: int = 0

    @property
    def new(self) -> int:
        return self.tokens - self.cached


class PromptTokens:
    """Of one model."""

    def __init__(self) -> None:
        self._whole = LeastSquares(_SCALES, _ASSUMED)
        self._new = LeastSquares(_SCALES, _ASSUMED)
        self._hits: deque[bool] = deque(maxlen=_HITS_MAX)

    def note(self, length: PromptLength, timings: Timings) -> None:
        """Learn from a response."""
        found, computed = timings.cached_tokens, timings.prompt_tokens
        whole = max(1, found + computed)
        self._whole.add((1.0, length.tokens), whole)
        expected = whole * length.cached / length.tokens
        is_hit = True
        if length.cached >= _EXPECTED_MIN_TOKENS:
            is_hit = found >= _HIT * expected
            self._hits.append(is_hit)
        # A cache that was filled by others says nothing of lengths.
        if is_hit and found <= expected + _EXPECTED_MIN_TOKENS + _GROWN * whole:
            self._new.add((1.0, length.new), max(1, computed))

    def whole(self, length: PromptLength) -> int:
        """Return all tokens of a prompt."""
        return max(1, round(self._whole.value((1.0, length.tokens))))

    def new(self, length: PromptLength) -> int:
        """Return those of them that are computed."""
        if self._hits and sum(self._hits) < _HIT * len(self._hits):
            length = PromptLength(length.tokens)
        return max(1, min(self.whole(length), round(self._new.value((1.0, length.new)))))
