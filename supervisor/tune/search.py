"""Finds the best variant within a time budget, by successive halving. Pure but for its callables.

Only ratios to the base of the same round count. The better half goes on, those that help are
combined, and the best are measured against the base once more, in rounds of their own: a value that
was the best of many was also lucky, so it decides nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.bench.comparison import Comparison, compare
from supervisor.tune.goal import Goal
from supervisor.tune.rounds import Measure, Progress, Rounds
from supervisor.tune.trials import PER_PART, Trials
from supervisor.tune.variant import Variant, combined

# Checks the quality of a variant within so many seconds; returns a clause against it, or None.
Check = Callable[[Variant, float], Awaitable[str | None]]

# Ends of the stages, as shares of the time. The final needs most: it decides.
_BASE_UNTIL: Final = 0.4
_SCREEN_UNTIL: Final = (0.4, 0.5, 0.6)
_COMBINE_UNTIL: Final = 0.65
_CHECK_UNTIL: Final = 0.75
_KEPT: Final = 6
# Noise alone makes the best of many look better than the base.
_PROMISING: Final = 1.03
_COMBINATIONS: Final = 6
_FINALISTS: Final = 2
_FINAL_ROUNDS: Final = 30
_ENOUGH_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result.

    Attributes:
        winner: None if the base is as good.
        comparison: Of the winner, or of the best that did not win; None without a final.
        untried: What there was no time for.
        final_rounds: The rounds that decided.
    """

    winner: Variant | None
    comparison: Comparison | None
    untried: tuple[Variant, ...]
    final_rounds: range


class Search:
    """One search; `trials` can be read while it runs."""

    def __init__(  # noqa: PLR0913 (what it decides with, and what it acts by)
        self,
        goal: Goal,
        candidates: Sequence[Variant],
        measure: Measure,
        check: Check,
        *,
        budget_s: float,
        clock: Callable[[], float],
        seed: int,
        progress: Progress = lambda _stage, _left_s: None,
    ) -> None:
        """Begin a search among the candidates, of which the first promise most."""
        self.trials = Trials(goal)
        self._goal = goal
        self._untried = tuple(candidates)
        self._check = check
        self._clock = clock
        self._rounds = Rounds(
            self.trials, measure, budget_s=budget_s, clock=clock, seed=seed, progress=progress
        )

    async def run(self) -> Outcome:
        """Search until the result is certain or the time is over.

        Raises:
            BaseFailed: Nothing can be compared.
        """
        rounds = self._rounds
        await rounds.measure_base(rounds.at(_BASE_UNTIL))
        alive = await self._screen()
        finalists = await self._accepted(await self._combine(alive))
        final = await self._final(finalists)
        winner, comparison = self._decide(finalists, final)
        return Outcome(winner, comparison, self._untried, final)

    async def _screen(self) -> list[Variant]:
        """Measure as many as there is time for; more while none of them helps."""
        self._rounds.stage = "screening"
        alive: list[Variant] = []
        for share in _SCREEN_UNTIL:
            until_s = self._rounds.at(share)
            count = self._rounds.affordable(until_s)
            tried, self._untried = self._untried[:count], self._untried[count:]
            alive += await self._rounds.halve(tried, until_s, _KEPT)
            if any(self.trials.ratio(one) > _PROMISING for one in alive):
                break
        return alive

    def _helping(self, alive: Sequence[Variant]) -> list[Variant]:
        """The best of them that seem better than the base."""
        return [one for one in self.trials.ranked(alive) if self.trials.ratio(one) > 1][:_KEPT]

    async def _combine(self, alive: Sequence[Variant]) -> list[Variant]:
        """Measure what helps together, and the best alone; return all that help."""
        helping = self._helping(alive)
        if not helping:
            return []
        both = [*self._combinations(helping)[:_COMBINATIONS], *helping[:_FINALISTS]]
        self._rounds.stage = "combinations"
        best = await self._rounds.halve(both, self._rounds.at(_COMBINE_UNTIL), _FINALISTS)
        return [*best, *(one for one in self.trials.ranked(helping) if one not in best)]

    def _combinations(self, helping: Sequence[Variant]) -> list[Variant]:
        """Combinations of what helps, the most promising first."""
        groups: Iterable[tuple[Variant, ...]] = itertools.chain.from_iterable(
            itertools.combinations(helping, size) for size in range(2, len(helping) + 1)
        )
        found = [(self._promised(group), combined(group)) for group in groups]
        known = [(promised, one) for promised, one in found if one is not None]
        return [one for _, one in sorted(known, key=lambda pair: -pair[0])]

    def _promised(self, group: Iterable[Variant]) -> float:
        return math.prod(self.trials.ratio(one) * PER_PART for one in group)

    async def _accepted(self, alive: Sequence[Variant]) -> list[Variant]:
        """The first of them whose quality is accepted."""
        self._rounds.stage = "quality"
        accepted: list[Variant] = []
        for one in alive:
            if len(accepted) >= self._finalist_count():
                break
            if reason := await self._reason_against(one):
                self.trials.reject(one, reason)
            else:
                accepted.append(one)
        return accepted

    async def _reason_against(self, variant: Variant) -> str | None:
        left_s = self._rounds.at(_CHECK_UNTIL) - self._clock()
        if left_s <= 0:
            return "there was no time to check its quality"
        self._rounds.show()
        return await self._check(variant, left_s)

    def _finalist_count(self) -> int:
        rounds = self._rounds.left_s / self._rounds.cost_s / (_FINALISTS + 1)
        return _FINALISTS if rounds >= _ENOUGH_ROUNDS else 1

    async def _final(self, finalists: Sequence[Variant]) -> range:
        self._rounds.stage = "final"
        first = self._rounds.number + 1
        for _ in range(_FINAL_ROUNDS if finalists else 0):
            if not await self._rounds.run(finalists, self._rounds.at(1)):
                break
        return range(first, self._rounds.number + 1)

    def _decide(
        self, finalists: Sequence[Variant], final: range
    ) -> tuple[Variant | None, Comparison | None]:
        ranked = self.trials.ranked(finalists, final)
        comparisons = [(one, self._compared(one, final)) for one in ranked]
        for one, comparison in comparisons:
            if comparison.is_better(self._goal.words) and self._is_free(one, final):
                return one, comparison
        return None, comparisons[0][1] if comparisons else None

    def _compared(self, variant: Variant, rounds: Iterable[int]) -> Comparison:
        base, other = self.trials.pairs(variant, rounds)
        value = self._goal.value
        return compare(list(map(value, base)), list(map(value, other)), words=self._goal.words)

    def _is_free(self, variant: Variant, rounds: Iterable[int]) -> bool:
        """Whether nothing else gets worse; otherwise it is rejected."""
        reason = self._goal.drawback(*self.trials.pairs(variant, rounds))
        if reason:
            self.trials.reject(variant, reason)
        return reason is None and self.trials.is_alive(variant)
