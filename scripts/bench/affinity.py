"""Measure what affinity saves, against other ways to choose an engine, side by side in one run.

Two engines of one thread each serve SmolLM2-135M behind the real proxy. Prompt tokens computed come
from the engine's own `timings`: they depend on which cache was met, not on how busy the machine is.
Times do depend on that, so they are compared only between runs that took turns, as ratios.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tiny_gguf
from end_to_end.home import Corral

from scripts.bench.arrangement import (
    AFFINITY,
    DEFAULT_LEAST_BUSY,
    LEAST_BUSY,
    STICKY,
    Arrangement,
    run,
)
from scripts.bench.talks import Tally, Workload
from supervisor.host import download
from supervisor.host.paths import directories

W1 = Workload("W1")
W2 = Workload("W2", conversations=24, think_s=0.5)
W3 = Workload("W3", applications=1, conversations=48, turns=1, clients=8)
W4 = Workload("W4")
W5 = Workload("W5", applications=0, conversations=48, turns=1, clients=8)
W7 = Workload("W7", conversations=24, turns=3, clients=24)
FIRST_SEED = 101
# Room for three of W2's histories, of 24.
SMALL_CACHE: Mapping[str, object] = {"cache-ram": 32}


def main() -> int:
    """Run the named workloads, print their tables, and return 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["W1"], choices=[[], *BENCHES])
    parser.add_argument("--seeds", type=int, default=10, help="runs where tokens are counted")
    parser.add_argument("--repeats", type=int, default=5, help="runs where time is measured")
    parser.add_argument("--tiny", action="store_true", help="a random model of 270 kB instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), is_tiny=options.tiny)
        missed = [
            goal
            for name in options.workloads
            for goal in BENCHES[name](model, options.seeds, options.repeats)
        ]
    for goal in missed:
        print(f"missed: {goal}")
    return 1 if missed else 0


def _model(directory: Path, *, is_tiny: bool) -> Path:
    if is_tiny:
        return tiny_gguf.make(directory / "tiny.gguf", ctx=16384)
    return download.find_pin("smollm2").path(directories().models)


def bench_w1(model: Path, seeds: int, repeats: int) -> list[str]:
    """Two applications, ten conversations of five turns, four clients."""
    ways = [DEFAULT_LEAST_BUSY, LEAST_BUSY, STICKY, AFFINITY]
    tallies = _interleaved(ways, model, W1, max(seeds, repeats))
    _show(W1, tallies)
    ours = _mean_prefilled(tallies[AFFINITY])
    default = _mean_prefilled(tallies[DEFAULT_LEAST_BUSY]) / ours
    sticky = _mean_prefilled(tallies[STICKY]) / ours
    print(f"least busy on the engine's defaults: {default:.2f} times ours; sticky: {sticky:.2f}")
    goals = {
        f"a mean of at most 4 900 tokens ({ours:.0f})": ours <= 4900,
        f"1.9 times below least busy on the engine's defaults ({default:.2f})": default >= 1.9,
        f"1.1 times below sticky sessions ({sticky:.2f})": sticky >= 1.1,
    }
    return [goal for goal, is_met in goals.items() if not is_met]


def bench_w2(model: Path, seeds: int, repeats: int) -> list[str]:
    """Three times as many conversations as slots, pauses between turns, a small host cache."""
    del seeds
    ways = [way.with_flags(SMALL_CACHE) for way in (LEAST_BUSY, STICKY, AFFINITY)]
    tallies = _interleaved(ways, model, W2, repeats)
    _show(W2, tallies)
    return []


def bench_w3(model: Path, seeds: int, repeats: int) -> list[str]:
    """One system prompt that everybody shares: no engine may be left idle for its sake."""
    del seeds
    tallies = _interleaved([LEAST_BUSY, AFFINITY], model, W3, repeats)
    _show(W3, tallies)
    counts = [tally.decoded for tally in tallies[AFFINITY]]
    both = all(len(count) == 2 for count in counts)
    worst = max(max(count.values()) / min(count.values()) for count in counts)
    print(f"busiest to least busy engine, the worst of {repeats} runs: {worst:.2f}")
    return [] if both and worst < 1.5 else [f"busiest to least busy engine under 1.5 ({worst:.2f})"]


def bench_w4(model: Path, seeds: int, repeats: int) -> list[str]:
    """An engine is killed half-way; tries that broke off with it are made again."""
    del seeds
    half = W4.conversations * W4.turns // 2

    def kill(corral: Corral, count: int) -> None:
        if count == half:
            model_status = corral.data("status")["models"][0]
            os.kill(model_status["instances"][0]["pid"], signal.SIGKILL)

    tallies = _interleaved([LEAST_BUSY, AFFINITY], model, W4, repeats, kill)
    _show(W4, tallies)
    broken = max(len(tally.failures) for tally in tallies[AFFINITY])
    return [] if broken <= W4.clients else [f"at most {W4.clients} tries broken ({broken})"]


def bench_w5(model: Path, seeds: int, repeats: int) -> list[str]:
    """Nothing is shared: what affinity costs where it can save nothing."""
    del seeds
    tallies = _interleaved([LEAST_BUSY, AFFINITY], model, W5, repeats)
    _show(W5, tallies)
    cost = statistics.median(_ratios(tallies, AFFINITY, LEAST_BUSY, lambda tally: tally.wall_s))
    print(f"affinity takes {cost:.3f} times as long (median of {repeats} pairs)")
    return [] if cost <= 1.02 else [f"a cost of at most 2 % ({cost - 1:.1%})"]


def bench_w7(model: Path, seeds: int, repeats: int) -> list[str]:
    """Three clients for each slot: the line is never empty, and homes have no free lease."""
    del seeds
    tallies = _interleaved([LEAST_BUSY, AFFINITY], model, W7, repeats)
    _show(W7, tallies)
    failed = [reason for tally in tallies[AFFINITY] for reason in tally.failures]
    return [f"nothing fails ({failed[0]})"] if failed else []


BENCHES: Mapping[str, Callable[[Path, int, int], list[str]]] = {
    "W1": bench_w1,
    "W2": bench_w2,
    "W3": bench_w3,
    "W4": bench_w4,
    "W5": bench_w5,
    "W7": bench_w7,
}

Tallies = Mapping[Arrangement, Sequence[Tally]]


def _interleaved(
    ways: Sequence[Arrangement],
    model: Path,
    workload: Workload,
    rounds: int,
    meanwhile: Callable[[Corral, int], None] = lambda *_: None,
) -> dict[Arrangement, list[Tally]]:
    """Run every arrangement once a round, all of a round with the same seed."""
    tallies: dict[Arrangement, list[Tally]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            tally = run(way, model, workload, FIRST_SEED + number, meanwhile)
            tallies[way].append(tally)
            label = f"{workload.name} seed {FIRST_SEED + number}, {way.name}"
            print(f"{label}: {tally.prefilled}", file=sys.stderr)
    return tallies


def _show(workload: Workload, tallies: Tallies) -> None:
    """Print a line for each arrangement; times are ratios to the last one, run by run."""
    *_, ours = tallies
    print(f"\n{workload}\n")
    heads = ("tokens computed", "cached", "first token", "wall", "broken")
    print("{:30} {:>24} {:>7} {:>18} {:>18} {:>7}".format("", *heads))
    for way, runs in tallies.items():
        prefilled = [tally.prefilled for tally in runs]
        cached = statistics.mean(tally.cached_share for tally in runs)
        broken = sum(len(tally.failures) for tally in runs)
        first = _spread(_ratios(tallies, way, ours, _first_token_s))
        wall = _spread(_ratios(tallies, way, ours, lambda tally: tally.wall_s))
        mean = f"{statistics.mean(prefilled):.0f} ({min(prefilled)} to {max(prefilled)})"
        print(f"{way.name:30} {mean:>24} {cached:7.3f} {first:>18} {wall:>18} {broken:7}")
    print(f"\nfirst token and wall: times ours; ours took {_seconds(tallies[ours])}")


def _ratios(
    tallies: Tallies, one: Arrangement, other: Arrangement, figure: Callable[[Tally], float]
) -> list[float]:
    pairs = zip(tallies[one], tallies[other], strict=True)
    return [figure(tally) / figure(base) for tally, base in pairs]


def _first_token_s(tally: Tally) -> float:
    return statistics.mean(answer.first_token_s for answer in tally.answers)


def _mean_prefilled(tallies: Sequence[Tally]) -> float:
    return statistics.mean(tally.prefilled for tally in tallies)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _seconds(tallies: Sequence[Tally]) -> str:
    first = statistics.median(_first_token_s(tally) for tally in tallies)
    wall = statistics.median(tally.wall_s for tally in tallies)
    return f"{first:.2f} s to the first token, {wall:.1f} s in all (medians)"


if __name__ == "__main__":
    sys.exit(main())
