"""The timings of a response, and running averages. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

# Weight of the newest value: the last five make up most of the average.
_NEWEST: Final = 0.3
_NUMBER: Final = (int, float)
_NAMES: Final = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "draft_n",
    "draft_n_accepted",
)


@dataclass(frozen=True, slots=True)
class Timings:
    """`timings` of a response; `prompt_tokens` are those computed, without the cached ones.

    Source: llama-server, builds 10434 and 11434.
    """

    cached_tokens: int
    prompt_tokens: int
    prompt_ms: float
    decoded_tokens: int
    decode_ms: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def read(cls, timings: object) -> Timings | None:
        """Parse the member `timings`; None if it is invalid."""
        if not isinstance(timings, dict):
            return None
        figures = [timings.get(name, 0) for name in _NAMES]
        for figure in figures:
            if not isinstance(figure, _NUMBER) or not figure >= 0:  # NaN is neither
                return None
        cached, prompt, prompt_ms, decoded, decode_ms, drafted, accepted = figures
        return cls(
            int(cached),
            int(prompt),
            float(prompt_ms),
            int(decoded),
            float(decode_ms),
            int(drafted),
            int(accepted),
        )

    def with_chunks(self, chunked: Timings) -> Timings:
        """Count as computed what earlier requests computed and this one found in the cache."""
        computed = min(chunked.prompt_tokens, self.cached_tokens)
        return replace(
            self,
            cached_tokens=self.cached_tokens - computed,
            prompt_tokens=self.prompt_tokens + computed,
            prompt_ms=self.prompt_ms + chunked.prompt_ms,
        )

    def with_discarded(self, discarded: Timings) -> Timings:
        """Add the tokens that a discarded earlier response to the same prompt generated."""
        alone = replace(discarded, cached_tokens=0, prompt_tokens=0, prompt_ms=0.0)
        return self.added_to(alone)

    def added_to(self, other: Timings | None) -> Timings:
        """The sums; times may overlap."""
        if other is None:
            return self
        return Timings(
            self.cached_tokens + other.cached_tokens,
            self.prompt_tokens + other.prompt_tokens,
            self.prompt_ms + other.prompt_ms,
            self.decoded_tokens + other.decoded_tokens,
            self.decode_ms + other.decode_ms,
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
        )


def average(before: float, now: float) -> float:
    """A running average after one more value."""
    return before + _NEWEST * (now - before)
