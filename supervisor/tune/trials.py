"""What was measured of each variant so far. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from supervisor.tune.goal import Figures, Goal
from supervisor.tune.variant import BASE, Variant

# A combination must be better by 1 % for each further change.
PER_PART: Final = 0.99


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a variant was not measured, as a clause."""

    reason: str


@dataclass(slots=True)
class Trial:
    """One variant: its figures by round, and why it was given up, if it was."""

    variant: Variant
    rounds: dict[int, Figures] = field(default_factory=dict)
    failure: str | None = None


class Trials:
    """All variants, with the base's figures of the same rounds to compare with."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self._trials: dict[Variant, Trial] = {BASE: Trial(BASE)}

    def add(self, variant: Variant, round_number: int, found: Figures | Failure) -> None:
        trial = self._trials.setdefault(variant, Trial(variant))
        if isinstance(found, Figures):
            trial.rounds[round_number] = found
        elif variant != BASE:
            trial.failure = found.reason

    def reject(self, variant: Variant, reason: str) -> None:
        self._trials.setdefault(variant, Trial(variant)).failure = reason

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was compared."""
        return all(math.isnan(self.ratio(one)) for one in self._trials if one != BASE)

    def is_alive(self, variant: Variant) -> bool:
        trial = self._trials.get(variant)
        return trial is None or trial.failure is None

    def pairs(
        self, variant: Variant, rounds: Iterable[int] | None = None
    ) -> tuple[list[Figures], list[Figures]]:
        """The base's figures and the variant's of the rounds that both finished."""
        base, other = self._trials[BASE].rounds, self._trials[variant].rounds
        wanted = sorted(base.keys() & other.keys() & set(other if rounds is None else rounds))
        return [base[one] for one in wanted], [other[one] for one in wanted]

    def ratio(self, variant: Variant, rounds: Iterable[int] | None = None) -> float:
        """How much better than the base it did, the geometric mean; nan if unknown."""
        if variant not in self._trials:
            return math.nan
        base, other = self.pairs(variant, rounds)
        score = self.goal.score
        logs = [math.log(score(b) / score(a)) for a, b in zip(base, other, strict=True)]
        return math.exp(statistics.fmean(logs)) if logs else math.nan

    def ranked(self, variants: Iterable[Variant], rounds: range | None = None) -> list[Variant]:
        """Those that were measured and not given up, the best first."""
        known = [
            (self.ratio(one, rounds) * PER_PART ** (one.parts - 1), one)
            for one in variants
            if self.is_alive(one)
        ]
        known = [(ratio, one) for ratio, one in known if not math.isnan(ratio)]
        return [one for _, one in sorted(known, key=lambda pair: -pair[0])]
