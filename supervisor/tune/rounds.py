"""Measures variants in rounds, each with the base among them, within a time budget."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from supervisor.tune.goal import Figures
from supervisor.tune.trials import Failure, Trials
from supervisor.tune.variant import BASE, Variant

# Measures a variant within so many seconds.
Measure = Callable[[Variant, float], Awaitable[Figures | Failure]]
# Takes the stage, and the seconds that are left.
Progress = Callable[[str, float], None]

# A machine's speed drifts: a round is short, so that its base is measured at the same time.
_GROUP: Final = 6
_PASSES: Final = 3
# A variant may take so many times as long as the base, and this longer: a start varies.
_LIMIT_FACTOR: Final = 4
_LIMIT_MORE_S: Final = 5.0


class BaseFailed(Exception):
    """The base could not be measured; the text is a clause."""


class Rounds:
    """The measurements of one search; no measurement outlasts the budget."""

    def __init__(
        self,
        trials: Trials,
        measure: Measure,
        *,
        budget_s: float,
        clock: Callable[[], float],
        seed: int,
        progress: Progress,
    ) -> None:
        """Begin; the budget counts from now."""
        self.stage = "base"
        self.number = 0
        self._trials = trials
        self._measure = measure
        self._progress = progress
        self._clock = clock
        self._shares_from_s = clock()
        self._end_s = clock() + budget_s
        self._random = random.Random(seed)  # noqa: S311 (an order, not a secret)
        self._taken_s: list[float] = []
        self._base_s = 0.0

    async def measure_base(self, until_s: float) -> None:
        """Measure it twice without counting it: the first start reads the model from disk.

        Raises:
            BaseFailed: Nothing can be compared.
        """
        for _ in range(2):
            found = await self._timed(BASE, until_s - self._clock())
            if isinstance(found, Failure):
                raise BaseFailed(found.reason)
            self._base_s = self._taken_s[-1]
            del self._taken_s[:-1]
        self._shares_from_s = self._clock()

    async def halve(self, alive: Sequence[Variant], until_s: float, kept: int) -> list[Variant]:
        """Measure variants in passes, of which the better half goes on to the next."""
        found: Sequence[Variant] = alive
        for _ in range(_PASSES):
            if not await self._pass(alive, until_s):
                break
            found = self._trials.ranked(alive)
            alive = found[: max(kept, math.ceil(len(found) / 2))]
        return self._trials.ranked(found)

    async def run(self, variants: Sequence[Variant], until_s: float) -> bool:
        """Measure the base and as many variants as there is time for; False if for none."""
        room = int((until_s - self._clock()) / self.cost_s) - 1
        fitting = [one for one in variants if self._trials.is_alive(one)][: max(0, room)]
        if not fitting:
            return False
        order = [BASE, *fitting]
        self._random.shuffle(order)
        self.number += 1
        for one in order:
            found = await self._timed(one, self._limit_s())
            if isinstance(found, Failure) and self.left_s <= 0:
                return False  # the time is over, which says nothing of the variant
            self._trials.add(one, self.number, found)
        return True

    def affordable(self, until_s: float) -> int:
        """How many variants can go through all passes: half of them do so twice, and so on."""
        measurements = (until_s - self._clock()) / self.cost_s * _GROUP / (_GROUP + 1)
        return max(0, int(measurements / sum(0.5**number for number in range(_PASSES))))

    def at(self, share: float) -> float:
        """The time on the clock when this share of the time since the base is used."""
        return self._shares_from_s + (self._end_s - self._shares_from_s) * share

    @property
    def left_s(self) -> float:
        return self._end_s - self._clock()

    @property
    def cost_s(self) -> float:
        """What a measurement takes, on average."""
        return max(1e-3, sum(self._taken_s) / len(self._taken_s))

    def show(self) -> None:
        self._progress(self.stage, self.left_s)

    async def _pass(self, variants: Sequence[Variant], until_s: float) -> bool:
        """Measure each once; False if the time is over."""
        alive = [one for one in variants if self._trials.is_alive(one)]
        self._random.shuffle(alive)
        for at in range(0, len(alive), _GROUP):
            if not await self.run(alive[at : at + _GROUP], until_s):
                return False
        return bool(alive)

    async def _timed(self, variant: Variant, limit_s: float) -> Figures | Failure:
        if limit_s <= 0:
            return Failure("there was no time left")
        self.show()
        began_at_s = self._clock()
        found = await self._measure(variant, limit_s)
        self._taken_s.append(self._clock() - began_at_s)
        return found

    def _limit_s(self) -> float:
        return min(self.left_s, self._base_s * _LIMIT_FACTOR + _LIMIT_MORE_S)
