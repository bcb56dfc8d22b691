"""Finds the best variant for a goal within a time budget, by rounds and successive halving.

Does no I/O but through its callables. Only ratios to the base of the same round count. The better
half continues, variants that help are combined, and the best are measured against the base once
more in separate rounds: a value that was the best of many was also lucky, so it decides nothing.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import attrs

from supervisor.bench.figures import AMOUNT, RATE, TIME, Comparison, Words, compare
from supervisor.bench.tune_space import BASE, GoalName, Variant, combine_variants

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
    """The goal; `title` names the figure that counts, `words` compare it."""

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
        """Return a figure that gets too much worse, comparing rounds, as a clause, or None."""

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


# Measures a variant within a number of seconds.
Measure = Callable[[Variant, float], Awaitable[Figures | str]]
# Takes the stage and the remaining seconds.
Progress = Callable[[str, float], None]

# A machine's speed drifts: rounds are short, so that the base is measured at the same time.
_GROUP: Final = 6
_PASSES: Final = 3
# A variant may take this many times as long as the base, plus some seconds: starts vary.
_LIMIT_FACTOR: Final = 4
_LIMIT_MORE_S: Final = 5.0


class BaseFailed(Exception):
    """The base could not be measured; the text is a clause."""


# Begins a clause that says nothing of the quality.
UNCHECKED: Final = "its quality could not be checked: "
NO_TIME: Final = f"{UNCHECKED}there was no time"
# Checks a variant's quality within a number of seconds; returns a clause against it, or None.
Check = Callable[[Variant, float], Awaitable[str | None]]

# Ends of the stages, as shares of the time. The final decides, so it gets most.
_BASE_UNTIL: Final = 0.4
_SCREEN_UNTIL: Final = (0.4, 0.5, 0.6)
_COMBINE_UNTIL: Final = 0.65
_CHECK_UNTIL: Final = 0.75
_KEPT: Final = 6
# Below this ratio, noise alone explains that the best of many looks better than the base.
_PROMISING: Final = 1.03
_COMBINATIONS: Final = 6
_FINALISTS: Final = 2
_FINAL_ROUNDS: Final = 30
_ENOUGH_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    winner: Variant | None  # None if the base is as good
    comparison: Comparison | None  # of the winner, or else the best finalist; None without a final
    untried: tuple[Variant, ...]  # variants that there was no time for
    final_rounds: range


@attrs.define(eq=False, slots=False)
class Search:
    """One search; `trials` can be read while it runs. The budget counts from its construction.

    `candidates` are ordered, the most promising first.
    """

    _goal: Goal
    _candidates: Sequence[Variant]
    _measure: Measure
    _check: Check
    _budget_s: float
    _clock: Callable[[], float]
    _seed: int
    _stage: str = attrs.field(default="base", init=False)
    number: int = attrs.field(default=0, init=False)  # of the last round
    _taken_s: list[float] = attrs.field(factory=list, init=False)
    _base_s: float = attrs.field(default=0.0, init=False)

    def __attrs_post_init__(self) -> None:
        self.trials = Trials(self._goal)
        self._untried = tuple(self._candidates)
        self._progress: Progress = lambda _stage, _left_s: None
        self._shares_from_s = self._clock()
        self._end_s = self._clock() + self._budget_s
        self._random = random.Random(self._seed)  # noqa: S311 (an order, not a secret)

    async def run(self, progress: Progress | None = None) -> Outcome:
        """Search until the result is certain or the time is over; raises BaseFailed."""
        self._progress = progress or self._progress
        await self.measure_base(self.time_at(_BASE_UNTIL))
        # As many variants as time allows; more time while none of them helps.
        self._stage = "screening"
        alive: list[Variant] = []
        for share in _SCREEN_UNTIL:
            until_s = self.time_at(share)
            # All passes must have time for them; each pass has half of the last.
            measurements = (until_s - self._clock()) / self.cost_s * _GROUP / (_GROUP + 1)
            count = max(0, int(measurements / sum(0.5**number for number in range(_PASSES))))
            tried, self._untried = self._untried[:count], self._untried[count:]
            alive += await self.halve(tried, until_s, _KEPT)
            if any(self.trials.ratio(variant) > _PROMISING for variant in alive):
                break

        return await self._final(await self._combine(alive))

    async def check(self, variant: Variant, progress: Progress) -> Outcome:
        """Compare one variant with the base until the result is certain or the time is over.

        Raises BaseFailed.
        """
        self._progress, self._untried = progress, ()
        await self.measure_base(self.time_at(_BASE_UNTIL))
        return await self._final([variant])

    async def _final(self, alive: Sequence[Variant]) -> Outcome:
        finalists = await self._accept_finalists(alive)
        self._stage = "final"
        first = self.number + 1
        for _ in range(_FINAL_ROUNDS if finalists else 0):
            if not await self.measure_round(finalists, self.time_at(1)):
                break
        final = range(first, self.number + 1)
        winner, comparison = self._decide(finalists, final)
        return Outcome(winner, comparison, self._untried, final)

    async def _combine(self, alive: Sequence[Variant]) -> list[Variant]:
        """Measure combinations of helpful variants, and the best alone; return all that help."""
        helping = [
            variant for variant in self.trials.rank(alive) if self.trials.ratio(variant) > 1
        ][:_KEPT]
        if not helping:
            return []
        both = [*self._combinations(helping)[:_COMBINATIONS], *helping[:_FINALISTS]]
        self._stage = "combinations"
        best = await self.halve(both, self.time_at(_COMBINE_UNTIL), _FINALISTS)
        return [*best, *(variant for variant in self.trials.rank(helping) if variant not in best)]

    def _combinations(self, helping: Sequence[Variant]) -> list[Variant]:
        groups: Iterable[tuple[Variant, ...]] = itertools.chain.from_iterable(
            itertools.combinations(helping, size) for size in range(2, len(helping) + 1)
        )
        found = [
            (
                math.prod(self.trials.ratio(variant) * PER_PART for variant in group),
                combine_variants(group),
            )
            for group in groups
        ]
        known = [(promised, variant) for promised, variant in found if variant is not None]
        return [variant for _, variant in sorted(known, key=lambda pair: -pair[0])]

    async def _accept_finalists(self, alive: Sequence[Variant]) -> list[Variant]:
        self._stage = "quality"
        accepted: list[Variant] = []
        for variant in alive:
            rounds = self._left_s / self.cost_s / (_FINALISTS + 1)
            if len(accepted) >= (_FINALISTS if rounds >= _ENOUGH_ROUNDS else 1):
                break
            if reason := await self._reason_against(variant):
                self.trials.reject(variant, reason)
            else:
                accepted.append(variant)
        return accepted

    async def _reason_against(self, variant: Variant) -> str | None:
        left_s = self.time_at(_CHECK_UNTIL) - self._clock()
        if left_s <= 0:
            return NO_TIME
        self._show()
        return await self._check(variant, left_s)

    def _decide(
        self, finalists: Sequence[Variant], final: range
    ) -> tuple[Variant | None, Comparison | None]:
        ranked = self.trials.rank(finalists, final)
        comparisons = [(variant, self._compare(variant, final)) for variant in ranked]
        for variant, comparison in comparisons:
            if comparison.is_better(self._goal.words) and self._is_free(variant, final):
                return variant, comparison
        return None, comparisons[0][1] if comparisons else None

    def _compare(self, variant: Variant, rounds: Iterable[int]) -> Comparison:
        base, other = self.trials.pairs(variant, rounds)
        value = self._goal.value
        return compare(list(map(value, base)), list(map(value, other)), words=self._goal.words)

    def _is_free(self, variant: Variant, rounds: Iterable[int]) -> bool:
        """Return whether nothing else gets worse; reject the variant if something does."""
        reason = self._goal.drawback(*self.trials.pairs(variant, rounds))
        if reason:
            self.trials.reject(variant, reason)
        return reason is None

    async def measure_base(self, until_s: float) -> None:
        """Measure the base twice uncounted, as the first start reads the disk; or BaseFailed."""
        for _ in range(2):
            found = await self._timed(BASE, until_s - self._clock())
            if isinstance(found, str):
                raise BaseFailed(found)
            self._base_s = self._taken_s[-1]
            del self._taken_s[:-1]
        self._shares_from_s = self._clock()

    async def halve(self, alive: Sequence[Variant], until_s: float, kept: int) -> list[Variant]:
        """Measure variants in passes; the better half of each continues to the next."""
        found: Sequence[Variant] = alive
        for _ in range(_PASSES):
            if not await self._pass(alive, until_s):
                break
            found = self.trials.rank(alive)
            alive = found[: max(kept, math.ceil(len(found) / 2))]
        return self.trials.rank(found)

    async def measure_round(self, variants: Sequence[Variant], until_s: float) -> bool:
        """Measure the base and as many variants as time allows; return False if none."""
        room = int((until_s - self._clock()) / self.cost_s) - 1
        fitting = [variant for variant in variants if self.trials.is_alive(variant)][: max(0, room)]
        if not fitting:
            return False
        order = [BASE, *fitting]
        self._random.shuffle(order)
        self.number += 1
        for variant in order:
            found = await self._timed(
                variant, min(self._left_s, self._base_s * _LIMIT_FACTOR + _LIMIT_MORE_S)
            )
            if isinstance(found, str) and self._left_s <= 0:
                return False  # out of time, which says nothing about the variant
            self.trials.add(variant, self.number, found)
        return True

    def time_at(self, share: float) -> float:
        """Return the clock's time when this share of the time since the base is used."""
        return self._shares_from_s + (self._end_s - self._shares_from_s) * share

    @property
    def _left_s(self) -> float:
        return self._end_s - self._clock()

    @property
    def cost_s(self) -> float:
        return max(1e-3, sum(self._taken_s) / len(self._taken_s))

    def _show(self) -> None:
        self._progress(self._stage, self._left_s)

    async def _pass(self, variants: Sequence[Variant], until_s: float) -> bool:
        alive = [variant for variant in variants if self.trials.is_alive(variant)]
        self._random.shuffle(alive)
        for at in range(0, len(alive), _GROUP):
            if not await self.measure_round(alive[at : at + _GROUP], until_s):
                return False
        return bool(alive)

    async def _timed(self, variant: Variant, limit_s: float) -> Figures | str:
        if limit_s <= 0:
            return "there was no time left"
        self._show()
        began_at_s = self._clock()
        found = await self._measure(variant, limit_s)
        self._taken_s.append(self._clock() - began_at_s)
        return found
