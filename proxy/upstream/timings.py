"""How fast an instance is: what it says of each answer, and the running averages of that. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# The weight of the newest figure: of ten answers, the last five make up nearly all of the average.
_NEWEST: Final = 0.3
# An answer this short says more of how long one batch takes than of the rate.
_PREFILL_MIN_TOKENS: Final = 16
_DECODE_MIN_TOKENS: Final = 4
# Of an instance that has not answered yet: rather slow, so that nobody leaves a cache by a guess.
_PREFILL_TPS: Final = 100.0
_DECODE_TPS: Final = 30.0
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
    """What an instance did for one answer, in its own words.

    Attributes:
        cached_tokens: Tokens of the prompt that it took from its cache.
        prompt_tokens: Tokens of the prompt that it computed.
        prompt_ms: Time that took.
        decoded_tokens: Tokens it generated.
        decode_ms: Time that took.
        drafted_tokens: Tokens it guessed ahead.
        accepted_tokens: Those of them that came true.

    Source: `timings` of llama-server's answers, builds 10434 and 11434: `cache_n`, `prompt_n`,
    `prompt_ms`, `predicted_n`, `predicted_ms`, `draft_n`, `draft_n_accepted`.
    """

    cached_tokens: int
    prompt_tokens: int
    prompt_ms: float
    decoded_tokens: int
    decode_ms: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def read(cls, said: object) -> Timings | None:
        """Read the member `timings` of an answer; None where it is not what it should be."""
        if not isinstance(said, dict):
            return None
        figures = [said.get(name, 0) for name in _NAMES]
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

    def added_to(self, other: Timings | None) -> Timings:
        """Return the sum of both: tokens, and times, which may have passed side by side."""
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


@dataclass(frozen=True, slots=True)
class Rates:
    """Running averages of one instance's own rates, in tokens per second.

    Attributes:
        prefill_tps: Tokens of prompts computed each second; a guess before the first answer.
        decode_tps: Tokens generated each second for one request; a guess before the first answer.
        answers: Answers that went into them.
        acceptance: Share of the tokens guessed ahead that came true, 0 to 1; None before any was.
    """

    prefill_tps: float = _PREFILL_TPS
    decode_tps: float = _DECODE_TPS
    answers: int = 0
    acceptance: float | None = None

    def after(self, timings: Timings) -> Rates:
        """Return the averages with one more answer in them."""
        prefill_tps, decode_tps = self.prefill_tps, self.decode_tps
        if timings.prompt_tokens >= _PREFILL_MIN_TOKENS and timings.prompt_ms > 0:
            prefill_tps = self._mix(prefill_tps, timings.prompt_tokens / timings.prompt_ms * 1000)
        if timings.decoded_tokens >= _DECODE_MIN_TOKENS and timings.decode_ms > 0:
            decode_tps = self._mix(decode_tps, timings.decoded_tokens / timings.decode_ms * 1000)
        return Rates(prefill_tps, decode_tps, self.answers + 1, self._accepted(timings))

    def _accepted(self, timings: Timings) -> float | None:
        if not timings.drafted_tokens:
            return self.acceptance
        now = timings.accepted_tokens / timings.drafted_tokens
        return now if self.acceptance is None else average(self.acceptance, now)

    def _mix(self, before: float, now: float) -> float:
        return now if not self.answers else average(before, now)


def average(before: float, now: float) -> float:
    """Return a running average with one more figure in it."""
    return before + _NEWEST * (now - before)
