"""See `tuning`, the script of this name."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Final

from supervisor.bench.figures import compare
from supervisor.bench.own_engine import measure_threads
from supervisor.bench.tune import TuneJob
from supervisor.bench.tune_measure import Measurements
from supervisor.bench.tune_search import Search, Trials
from supervisor.bench.tune_space import BASE, Variant, combine_variants
from supervisor.cli.targets import choose
from supervisor.fleet.planner import LaunchPlanner
from supervisor.system import machine
from supervisor.system.paths import directories

AXES: Final = ("threads", "batch", "flash", "cache", "poll")
SEEDS: Final = (0, 1)
LIMIT_S: Final = 4 * 3600.0
FINAL_ROUNDS: Final = 10
EQUIVALENT: Final = 0.95


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--goal", default="latency", choices=("latency", "throughput", "memory"))
    return parser.parse_args()


def job(options: argparse.Namespace, seed: int) -> TuneJob:
    where = directories()
    targets = choose([options.model], None, where)
    return TuneJob(
        targets.loaded.settings,
        where,
        targets.names[0],
        options.goal,
        options.minutes,
        seed,
        first=(too_many_threads(),),
    )


def calibrate(model: str) -> None:
    """Measure thread counts, as `corral tune` does first."""
    where = directories()
    targets = choose([model], None, where)
    measure_threads(LaunchPlanner(targets.loaded.settings, where), targets.names[0], where)


def too_many_threads() -> Variant:
    return Variant(frozenset({"threads"}), (("threads", 8 * machine.read().logical_cores),))


def searched(options: argparse.Namespace, seed: int) -> Variant:
    began_at_s = time.monotonic()
    found = asyncio.run(job(options, seed).run(lambda _stage, _left_s: None))
    winner = found.winner or BASE
    verdict = found.comparison.verdict if found.comparison else "nothing was better"
    took_s = time.monotonic() - began_at_s
    print(f"seed {seed}: {winner.name} ({verdict}) in {took_s:.0f} s", flush=True)
    return winner


def grid(candidates: Sequence[Variant]) -> list[Variant]:
    """Every combination of one option, or none, of each axis."""
    bad = too_many_threads()
    by_axis = [
        [
            BASE,
            *(
                candidate
                for candidate in candidates
                if candidate.axes == {axis} and candidate != bad
            ),
        ]
        for axis in AXES
    ]
    groups = (
        [member for member in group if member != BASE] for group in itertools.product(*by_axis)
    )
    return [found for group in groups if group and (found := combine_variants(group))]


async def measured(
    options: argparse.Namespace, winners: Iterable[Variant]
) -> tuple[Trials, range, Variant]:
    """Measure the whole grid, then its best with the winners; return the rounds of the latter."""
    tuning = job(options, 0)
    rounds = Search(
        tuning.goal,
        (),
        Measurements(tuning.goal, tuning.plans, directories()).measure,
        tuning.checks.check,
        budget_s=LIMIT_S,
        clock=time.monotonic,
        seed=0,
    )
    await rounds.measure_base(rounds.time_at(1))
    everything = grid(tuning.candidates)
    print(f"grid: {len(everything)} combinations, about {rounds.cost_s:.1f} s each", flush=True)
    best, *_ = await rounds.halve(everything, rounds.time_at(0.9), 4)
    first = rounds.number + 1
    last = [key for key in dict.fromkeys([best, *winners]) if key != BASE]
    for _ in range(FINAL_ROUNDS):
        await rounds.measure_round(last, rounds.time_at(1))
    return rounds.trials, range(first, rounds.number + 1), best


def main() -> int:
    options = arguments()
    calibrate(options.model)
    winners = [searched(options, seed) for seed in SEEDS]
    trials, final, best = asyncio.run(measured(options, winners))
    most = trials.ratio(best, final)
    failures = ["a search took too many threads"] if too_many_threads() in winners else []
    print(f"best of the grid: {best.name}, {most:.3f} × the profile")
    for seed, winner in zip(SEEDS, winners, strict=True):
        ratio = 1.0 if winner == BASE else trials.ratio(winner, final)
        print(f"seed {seed}: {winner.name}, {ratio:.3f} × the profile, {ratio / most:.3f} × best")
        if ratio < EQUIVALENT * max(1.0, most):
            failures.append(f"seed {seed} found {ratio:.3f} ×, the grid {most:.3f} ×")
        if winner != BASE:
            base, other = trials.pairs(winner, final)
            value = trials.goal.value
            words = trials.goal.words
            print(
                f"  {compare(list(map(value, base)), list(map(value, other)), words=words).verdict}"
            )
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
