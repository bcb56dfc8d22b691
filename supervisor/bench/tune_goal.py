"""The goals of a tuning, and the measurements of each variant so far. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from supervisor.bench.figures import AMOUNT, RATE, TIME, Comparison, Words, compare
from supervisor.bench.tune_space import BASE, GoalName, Variant

# A short answer to a prompt of the measured length.
_ANSWER_TOKENS: Final = 200
# Decoding must keep this share of its speed when memory is saved.
_DECODE_KEPT: Final = 0.9
# A ratio above it is not called worse: the interval of few values is wide.
_WORSE: Final = 0.97


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement of a variant; 0 if the goal does not measure it."""

    decode: float = 0.0  # tokens/s of one stream
    first_token_s: float = 0.0  # for the measured prompt
    total: float = 0.0  # tokens/s of as many streams as slots
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Goal:
    """What to improve; `title` names the figure that counts, `words` compare it."""

    name: GoalName
    title: str
    words: Words = field(default=RATE)

    def value(self, found: Figures) -> float:
        """Return the figure that counts, in the direction of `words`."""
        match self.name:
            case "latency":
                return 1 / (found.first_token_s + _ANSWER_TOKENS / found.decode)
            case "throughput":
                return found.total
            case "memory":
                return float(found.peak_bytes)

    def score(self, found: Figures) -> float:
        """Return the figure that counts so that higher is better."""
        value = self.value(found)
        return value if self.words.is_above_better else 1 / value

    def drawback(self, base: Sequence[Figures], other: Sequence[Figures]) -> str | None:
        """Return what gets too much worse, comparing round by round, as a clause, or None."""

        def compared(read: Callable[[Figures], float], words: Words) -> Comparison:
            return compare([*map(read, base)], [*map(read, other)], words=words)

        decode = compared(attrgetter("decode"), RATE)
        if self.name == "memory":
            too_slow = decode.ratio < _DECODE_KEPT
            return f"it decodes at {decode.ratio:.2f} of the speed" if too_slow else None
        if self.name == "throughput":
            return None
        if decode.is_different and decode.ratio < _WORSE:
            return f"it decodes {decode.verdict}"
        first = compared(attrgetter("first_token_s"), TIME)
        if first.is_different and 1 / first.ratio < _WORSE:
            return f"the first token takes {first.verdict}"
        return None


GOALS: Final[Mapping[GoalName, Goal]] = {
    "latency": Goal("latency", "answers to a prompt of 500 tokens"),
    "throughput": Goal("throughput", "tokens/s of all streams together"),
    "memory": Goal("memory", "peak memory", AMOUNT),
}


# A combination must be better by 1 % for each further change.
PER_PART: Final = 0.99


@dataclass(slots=True)
class Trial:
    """A variant's figures by round, and why it was given up, if it was."""

    variant: Variant
    rounds: dict[int, Figures] = field(default_factory=dict)
    failure: str | None = None


class Trials:
    """All variants, and the base's figures in the same rounds to compare with."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self._trials: dict[Variant, Trial] = {BASE: Trial(BASE)}

    def add(self, variant: Variant, round_number: int, found: Figures | str) -> None:
        trial = self._trials.setdefault(variant, Trial(variant))
        if isinstance(found, Figures):
            trial.rounds[round_number] = found
        elif variant != BASE:
            trial.failure = found

    def reject(self, variant: Variant, reason: str) -> None:
        self._trials.setdefault(variant, Trial(variant)).failure = reason

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials.values())

    @property
    def is_empty(self) -> bool:
        return all(math.isnan(self.ratio(variant)) for variant in self._trials if variant != BASE)

    def is_alive(self, variant: Variant) -> bool:
        trial = self._trials.get(variant)
        return trial is None or trial.failure is None

    def pairs(
        self, variant: Variant, rounds: Iterable[int] | None = None
    ) -> tuple[list[Figures], list[Figures]]:
        base, other = self._trials[BASE].rounds, self._trials[variant].rounds
        wanted = sorted(base.keys() & other.keys() & set(other if rounds is None else rounds))
        return [base[number] for number in wanted], [other[number] for number in wanted]

    def ratio(self, variant: Variant, rounds: Iterable[int] | None = None) -> float:
        """Return how many times better than the base it was (geometric mean); nan if unknown."""
        if variant not in self._trials:
            return math.nan
        base, other = self.pairs(variant, rounds)
        score = self.goal.score
        logs = [math.log(score(b) / score(a)) for a, b in zip(base, other, strict=True)]
        return math.exp(statistics.fmean(logs)) if logs else math.nan

    def rank(self, variants: Iterable[Variant], rounds: range | None = None) -> list[Variant]:
        """Return the variants that were measured and not given up, the best first."""
        known = [
            (self.ratio(variant, rounds) * PER_PART ** (variant.parts - 1), variant)
            for variant in variants
            if self.is_alive(variant)
        ]
        known = [(ratio, variant) for ratio, variant in known if not math.isnan(ratio)]
        return [variant for _, variant in sorted(known, key=lambda pair: -pair[0])]
