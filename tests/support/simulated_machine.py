"""A machine that is measured in no time: variants have speeds, with noise and drift."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from supervisor.bench.tune_search import GOALS, Figures, Goal, Outcome, Search
from supervisor.bench.tune_space import GoalName, Variant


def change(axis: str, value: int = 1) -> Variant:
    return Variant(frozenset({axis}), ((axis, value),))


def _product(factors: Mapping[tuple[str, int], float], variant: Variant) -> float:
    return math.prod(factors.get((key, int(value)), 1.0) for key, value in variant.flags)


@dataclass
class Machine:
    """Speeds are factors of the base's by axis and value; noise and drift are of the logarithm.

    `decoding` has further factors, of the decoding alone.
    """

    speeds: Mapping[tuple[str, int], float] = field(default_factory=dict)
    decoding: Mapping[tuple[str, int], float] = field(default_factory=dict)
    noise: float = 0.03
    drift_per_min: float = 0.0
    takes_s: float = 3.0
    takes_noise: float = 0.0
    seed: int = 0
    stuck: frozenset[str] = frozenset()  # names of variants that never finish
    now_s: float = 100.0
    measured: list[str] = field(default_factory=list)
    rejected: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 (noise, the same for the same seed)

    def clock(self) -> float:
        return self.now_s

    def speed(self, variant: Variant) -> float:
        return _product(self.speeds, variant)

    async def measure(self, variant: Variant, limit_s: float) -> Figures | str:
        assert limit_s > 0
        self.measured.append(variant.name)
        speed = self.speed(variant)
        usual_s = self.takes_s * math.exp(self._random.gauss(0, self.takes_noise))
        takes_s = math.inf if variant.name in self.stuck else usual_s / min(1, speed)
        self.now_s += min(takes_s, limit_s)
        if takes_s > limit_s:
            return f"it took longer than {limit_s:.0f} s"
        drift = self.drift_per_min * (self.now_s - 100) / 60
        factor = speed * math.exp(self._random.gauss(drift, self.noise))
        return Figures(
            decode=100 * factor * _product(self.decoding, variant),
            first_token_s=1.5 / factor,
            total=150 * factor,
            peak_bytes=int(1e9 / factor),
        )

    async def check(self, variant: Variant, limit_s: float) -> str | None:
        self.now_s += min(6.0, limit_s)
        return self.rejected.get(variant.name)

    def search(
        self, *variants: Variant, goal: GoalName = "latency", budget_s: float = 300, seed: int = 1
    ) -> Search:
        found: Goal = GOALS[goal]
        return Search(
            found,
            variants,
            self.measure,
            self.check,
            budget_s=budget_s,
            clock=self.clock,
            seed=seed,
        )

    async def best(self, *variants: Variant, budget_s: float = 300, seed: int = 1) -> Outcome:
        return await self.search(*variants, budget_s=budget_s, seed=seed).run()
