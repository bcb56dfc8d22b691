"""What a goal counts: the score of a measurement, and what must not get worse for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from supervisor.bench.comparison import AMOUNT, RATE, TIME, Words, compare
from supervisor.tune.space import GoalName

# A short answer to a prompt of the measured length.
_ANSWER_TOKENS: Final = 200
# Of decode speed, the most that less memory may cost.
_DECODE_KEPT: Final = 0.9
# Below it a figure is not called worse: an interval of few values is wide.
_WORSE: Final = 0.97


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement of a variant; 0 where the goal does not measure it."""

    decode: float = 0.0  # tokens/s of one stream
    first_token_s: float = 0.0  # of the measured prompt
    total: float = 0.0  # tokens/s of as many streams as there are slots
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """What to improve.

    Attributes:
        title: Of the figure that counts.
        words: Of the comparison of that figure.
    """

    name: GoalName
    title: str
    words: Words = field(default=RATE)

    def value(self, found: Figures) -> float:
        """The figure that counts, in the direction of `words`."""
        match self.name:
            case "latency":
                return 1 / (found.first_token_s + _ANSWER_TOKENS / found.decode)
            case "throughput":
                return found.total
            case "memory":
                return float(found.peak_bytes)

    def score(self, found: Figures) -> float:
        """The same, higher for better."""
        value = self.value(found)
        return value if self.words.is_above_better else 1 / value

    def drawback(self, base: Sequence[Figures], other: Sequence[Figures]) -> str | None:
        """What gets worse by too much, round by round, as a clause; None if nothing does."""
        decode = compare([one.decode for one in base], [one.decode for one in other], words=RATE)
        if self.name == "memory":
            too_slow = decode.ratio < _DECODE_KEPT
            return f"it decodes at {decode.ratio:.2f} of the speed" if too_slow else None
        if self.name == "throughput":
            return None
        if decode.is_different and decode.ratio < _WORSE:
            return f"it decodes {decode.verdict}"
        first = compare(
            [one.first_token_s for one in base],
            [one.first_token_s for one in other],
            words=TIME,
        )
        if first.is_different and 1 / first.ratio < _WORSE:
            return f"the first token takes {first.verdict}"
        return None


GOALS: Final[Mapping[GoalName, Goal]] = {
    "latency": Goal("latency", "answers to a prompt of 500 tokens"),
    "throughput": Goal("throughput", "tokens/s of all streams together"),
    "memory": Goal("memory", "peak memory", AMOUNT),
}
