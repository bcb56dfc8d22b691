"""Compare cache affinity with other routing policies, interleaved in one run.

Two engines of one thread each serve SmolLM2-135M behind the real proxy. Computed prompt tokens come
from the engine's `timings`: they depend on cache hits, not on the machine's load. Times do depend
on the load, so they are compared only between interleaved runs, as ratios.
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
from corral_cli import CorralCli

from scripts.bench.conversations import Workload, WorkloadResult
from scripts.bench.deployment import (
    AFFINITY,
    BY_SPEED,
    DEFAULT_LEAST_BUSY,
    EQUAL,
    LEAST_BUSY,
    STICKY,
    Deployment,
    run,
)
from scripts.bench.result import Figure, Result
from supervisor.host import download
from supervisor.host.paths import directories

W1 = Workload("W1")
W2 = Workload("W2", conversations=24, think_s=0.5)
W3 = Workload("W3", applications=1, conversations=48, turns=1, clients=8)
W4 = Workload("W4")
W5 = Workload("W5", applications=0, conversations=48, turns=1, clients=8)
W7 = Workload("W7", conversations=24, turns=3, clients=24)
W8 = Workload("W8", conversations=16, turns=3, tokens=32, clients=6)
FIRST_SEED = 101
# Fits 3 of W2's 24 conversations.
SMALL_CACHE: Mapping[str, object] = {"cache-ram": 32}


def main() -> int:
    """Run the workloads, print their tables, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], choices=[[], *BENCHES])
    parser.add_argument("--seeds", type=int, default=10, help="runs that count tokens")
    parser.add_argument("--repeats", type=int, default=5, help="runs that measure time")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), is_tiny=options.tiny)
        parts = [
            BENCHES[name](model, options.seeds, options.repeats)
            for name in options.workloads or ["W1"]
        ]
    goals = {goal: is_met for part in parts for goal, is_met in part.goals.items()}
    found = Result(
        [figure for part in parts for figure in part.figures],
        {} if options.tiny else goals,
        notes=["A random tiny model: the goals, which are for SmolLM2, do not apply."]
        if options.tiny
        else [],
    )
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _model(directory: Path, *, is_tiny: bool) -> Path:
    if is_tiny:
        return tiny_gguf.make(directory / "tiny.gguf", ctx=16384)
    return download.find_pin("smollm2").path(directories().models)


def bench_w1(model: Path, seeds: int, repeats: int) -> Result:
    """Two applications, ten conversations of five turns, four clients."""
    deployments = [DEFAULT_LEAST_BUSY, LEAST_BUSY, STICKY, AFFINITY]
    results = _interleaved(deployments, model, W1, max(seeds, repeats))
    _show(W1, results)
    ours = _mean_prefilled(results[AFFINITY])
    default = _mean_prefilled(results[DEFAULT_LEAST_BUSY]) / ours
    sticky = _mean_prefilled(results[STICKY]) / ours
    print(f"least busy on the engine's defaults: {default:.2f} times ours; sticky: {sticky:.2f}")
    goals = {
        f"a mean of at most 4 900 tokens ({ours:.0f})": ours <= 4900,
        f"1.9 times below least busy on the engine's defaults ({default:.2f})": default >= 1.9,
        f"1.1 times below sticky sessions ({sticky:.2f})": sticky >= 1.1,
    }
    return _result(W1, results, goals)


def bench_w2(model: Path, seeds: int, repeats: int) -> Result:
    """Three times as many conversations as slots, pauses between turns, a small host cache."""
    del seeds
    deployments = [
        deployment.with_flags(SMALL_CACHE) for deployment in (LEAST_BUSY, STICKY, AFFINITY)
    ]
    results = _interleaved(deployments, model, W2, repeats)
    _show(W2, results)
    return _result(W2, results, {})


def bench_w3(model: Path, seeds: int, repeats: int) -> Result:
    """One system prompt for all conversations: it must not leave an engine idle."""
    del seeds
    results = _interleaved([LEAST_BUSY, AFFINITY], model, W3, repeats)
    _show(W3, results)
    counts = [result.decoded for result in results[AFFINITY]]
    both = all(len(count) == 2 for count in counts)
    worst = max(max(count.values()) / min(count.values()) for count in counts)
    print(f"busiest to least busy engine, the worst of {repeats} runs: {worst:.2f}")
    goals = {f"W3: busiest to least busy engine under 1.5 ({worst:.2f})": both and worst < 1.5}
    return _result(W3, results, goals)


def bench_w4(model: Path, seeds: int, repeats: int) -> Result:
    """One engine is killed half-way; requests that fail with it are retried."""
    del seeds
    half = W4.conversations * W4.turns // 2

    def kill(corral: CorralCli, count: int) -> None:
        if count == half:
            model_status = corral.data("status")["models"][0]
            os.kill(model_status["instances"][0]["pid"], signal.SIGKILL)

    results = _interleaved([LEAST_BUSY, AFFINITY], model, W4, repeats, kill)
    _show(W4, results)
    broken = max(len(result.failures) for result in results[AFFINITY])
    goals = {f"W4: at most {W4.clients} failed attempts ({broken})": broken <= W4.clients}
    return _result(W4, results, goals)


def bench_w5(model: Path, seeds: int, repeats: int) -> Result:
    """Nothing is shared: the cost of affinity where it cannot save anything."""
    del seeds
    results = _interleaved([LEAST_BUSY, AFFINITY], model, W5, repeats)
    _show(W5, results)
    cost = statistics.median(_ratios(results, AFFINITY, LEAST_BUSY, lambda result: result.wall_s))
    print(f"affinity takes {cost:.3f} times as long (median of {repeats} pairs)")
    return _result(W5, results, {f"W5: a cost of at most 2 % ({cost - 1:.1%})": cost <= 1.02})


def bench_w7(model: Path, seeds: int, repeats: int) -> Result:
    """Three clients per slot: the queue is never empty, and owners have no free slot."""
    del seeds
    results = _interleaved([LEAST_BUSY, AFFINITY], model, W7, repeats)
    _show(W7, results)
    failed = [reason for result in results[AFFINITY] for reason in result.failures]
    return _result(W7, results, {f"W7: nothing fails ({failed[:1]})": not failed})


def bench_w8(model: Path, seeds: int, repeats: int) -> Result:
    """One engine runs for a quarter of the time: conversations shared by speed, or equally."""
    del seeds
    results = _interleaved([EQUAL, BY_SPEED], model, W8, repeats)
    _show(W8, results)
    p95 = _ratios(results, EQUAL, BY_SPEED, _first_token_p95_s)
    print(f"first token, 95th percentile: equal weights take {_spread(p95)} times as long")
    return _result(W8, results, {})


BENCHES: Mapping[str, Callable[[Path, int, int], Result]] = {
    "W1": bench_w1,
    "W2": bench_w2,
    "W3": bench_w3,
    "W4": bench_w4,
    "W5": bench_w5,
    "W7": bench_w7,
    "W8": bench_w8,
}

Results = Mapping[Deployment, Sequence[WorkloadResult]]


def _interleaved(
    deployments: Sequence[Deployment],
    model: Path,
    workload: Workload,
    rounds: int,
    meanwhile: Callable[[CorralCli, int], None] = lambda *_: None,
) -> dict[Deployment, list[WorkloadResult]]:
    """Run every deployment once per round; all runs of a round share a seed."""
    results: dict[Deployment, list[WorkloadResult]] = {deployment: [] for deployment in deployments}
    for number in range(rounds):
        for deployment in deployments if number % 2 == 0 else reversed(deployments):
            result = run(deployment, model, workload, FIRST_SEED + number, meanwhile)
            results[deployment].append(result)
            label = f"{workload.name} seed {FIRST_SEED + number}, {deployment.name}"
            print(f"{label}: {result.prefilled}", file=sys.stderr)
    return results


def _result(workload: Workload, results: Results, goals: Mapping[str, bool]) -> Result:
    """Return the figures; times are multiples of the last deployment's, run by run."""
    *_, ours = results
    values: Mapping[tuple[str, str], Callable[[WorkloadResult], float]] = {
        ("prompt tokens computed", "tokens"): lambda one: one.prefilled,
        ("prompt from the cache", "%"): lambda one: 100 * one.cached_share,
        ("first token, mean", "s"): _first_token_s,
        ("first token, 95th percentile", "s"): _first_token_p95_s,
        ("all of it", "s"): lambda one: one.wall_s,
    }
    return Result(
        [
            Figure(
                f"{workload.name}: {name}",
                unit,
                {one.name: [value(run) for run in runs] for one, runs in results.items()},
                base="" if unit == "%" else ours.name,
            )
            for (name, unit), value in values.items()
        ],
        goals,
    )


def _show(workload: Workload, results: Results) -> None:
    """Print a line for each deployment; times are ratios to the last one, run by run."""
    *_, ours = results
    print(f"\n{workload}\n")
    heads = ("tokens computed", "cached", "first token", "wall", "failed")
    print("{:30} {:>24} {:>7} {:>18} {:>18} {:>7}".format("", *heads))
    for deployment, runs in results.items():
        prefilled = [result.prefilled for result in runs]
        cached = statistics.mean(result.cached_share for result in runs)
        broken = sum(len(result.failures) for result in runs)
        first = _spread(_ratios(results, deployment, ours, _first_token_s))
        wall = _spread(_ratios(results, deployment, ours, lambda result: result.wall_s))
        mean = f"{statistics.mean(prefilled):.0f} ({min(prefilled)} to {max(prefilled)})"
        print(f"{deployment.name:30} {mean:>24} {cached:7.3f} {first:>18} {wall:>18} {broken:7}")
    print(f"\nfirst token and wall are multiples of ours; ours took {_seconds(results[ours])}")


def _ratios(
    results: Results, one: Deployment, other: Deployment, figure: Callable[[WorkloadResult], float]
) -> list[float]:
    pairs = zip(results[one], results[other], strict=True)
    return [figure(result) / figure(base) for result, base in pairs]


def _first_token_s(result: WorkloadResult) -> float:
    return statistics.mean(answer.first_token_s for answer in result.answers)


def _first_token_p95_s(result: WorkloadResult) -> float:
    return statistics.quantiles((one.first_token_s for one in result.answers), n=20)[-1]


def _mean_prefilled(results: Sequence[WorkloadResult]) -> float:
    return statistics.mean(result.prefilled for result in results)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _seconds(results: Sequence[WorkloadResult]) -> str:
    first = statistics.median(_first_token_s(result) for result in results)
    wall = statistics.median(result.wall_s for result in results)
    return f"{first:.2f} s to the first token, {wall:.1f} s in all (medians)"


if __name__ == "__main__":
    sys.exit(main())
