"""Compare cache affinity with other routing policies, interleaved in one run.

Two engines of one thread each serve SmolLM2-135M behind the real proxy. Computed prompt tokens come
from the engine's `timings`: they depend on cache hits, not on the machine's load. Times do depend
on the load, so they are compared only between interleaved runs, as ratios. New tokens are those
that a cache which forgets nothing computes, and distinct ones those if each prefix is computed
once, both counted for each run (`scripts.bench.new_tokens`).

Only affinity saves conversations to slot files; beside it stands affinity without them, and for W4
the same without the kill. On two busy cores a run of W2 took 80 to 130 s, one of W7 30 to 70 s.

With `--hearth` and `--smg`, W1, W2 and W10 also run behind these (`scripts.bench.deployment`).
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from support import tiny_gguf
from support.corral_cli import CorralCli

from scripts.bench.conversations import Workload, WorkloadResult
from scripts.bench.deployment import (
    AFFINITY,
    ALL_KEYS,
    BY_SPEED,
    DEFAULT_LEAST_BUSY,
    EACH_KEY,
    EQUAL,
    HEARTH,
    LEAST_BUSY,
    SMG,
    STICKY,
    WITHOUT_FILES,
    Deployment,
    run,
)
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

W1 = Workload("W1")
W2 = Workload("W2", conversations=24, think_s=0.5)
W3 = Workload("W3", applications=1, conversations=48, turns=1, clients=8)
W4 = Workload("W4")
W5 = Workload("W5", applications=0, conversations=48, turns=1, clients=8)
W7 = Workload("W7", conversations=24, turns=3, clients=24)
W9 = Workload("W9", conversations=16, turns=3, tokens=32, clients=6)
# A system prompt of about 2 640 tokens, as of a coding agent.
W10 = Workload("W10", system_words=2600, turns=3)
FIRST_SEED = 101
# Fits 3 of W2's 24 conversations.
SMALL_CACHE: Mapping[str, object] = {"cache-ram": 32}
# If a ratio of times should be 1: the difference of two equal runs on a quiet machine.
TIME_NOISE = 1.02


@dataclass(frozen=True)
class Runs:
    """The workload of a bench.

    Attributes:
        model: GGUF file.
        seeds: Runs that count tokens.
        repeats: Runs that measure time.
        rivals: Other programs beside ours.
        is_tiny: The model has five tokens for a word.
        first_seed: Of the first run; each further run has the next one.
    """

    model: Path
    seeds: int
    repeats: int
    rivals: Sequence[Deployment]
    is_tiny: bool = False
    first_seed: int = FIRST_SEED


def main() -> int:
    """Run the workloads, print their tables, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=[], choices=[[], *BENCHES])
    parser.add_argument("--seeds", type=int, default=10, help="runs that count tokens")
    parser.add_argument("--repeats", type=int, default=5, help="runs that measure time")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, metavar="N")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--hearth", metavar="PATH", help="program of PyPI's hearth-llm")
    parser.add_argument("--smg", metavar="PATH", help="program of PyPI's smg")
    options = parser.parse_args()
    programs = {HEARTH: options.hearth, SMG: options.smg}
    rivals = [replace(rival, program=path) for rival, path in programs.items() if path]
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), is_tiny=options.tiny)
        parts = [
            BENCHES[name](
                Runs(
                    model, options.seeds, options.repeats, rivals, options.tiny, options.first_seed
                )
            )
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
    return pinned.find_pin("smollm2").path(directories().models)


def bench_w1(runs: Runs) -> Result:
    """Two applications, ten conversations of five turns, four clients."""
    ours_and_others = [DEFAULT_LEAST_BUSY, LEAST_BUSY, STICKY, WITHOUT_FILES, AFFINITY]
    deployments = [*runs.rivals, *ours_and_others]
    results = _interleaved(deployments, runs, W1, max(runs.seeds, runs.repeats))
    _show(W1, results)
    ours = _mean_prefilled(results[AFFINITY])
    default = _mean_prefilled(results[DEFAULT_LEAST_BUSY]) / ours
    sticky = _mean_prefilled(results[STICKY]) / ours
    files = ours / _mean_prefilled(results[WITHOUT_FILES])
    print(f"least busy on the engine's defaults: {default:.2f} times ours; sticky: {sticky:.2f}")
    goals = {
        f"a mean of at most 4 900 tokens ({ours:.0f})": ours <= 4900,
        f"1.9 times below least busy on the engine's defaults ({default:.2f})": default >= 1.9,
        f"1.1 times below sticky sessions ({sticky:.2f})": sticky >= 1.1,
        f"W1: at most 1.02 times those without slot files ({files:.3f})": files <= 1.02,
        **_rival_goals(W1, results, AFFINITY),
    }
    return _result(W1, results, goals)


def bench_keys(runs: Runs) -> Result:
    """W1, whose conversations have five API keys in turn: the cost of separate caches."""
    results = _interleaved([EACH_KEY, ALL_KEYS], runs, W1, max(runs.seeds, runs.repeats))
    _show(W1, results)
    cost = _mean_prefilled(results[EACH_KEY]) / _mean_prefilled(results[ALL_KEYS])
    print(f"without sharing, {cost:.2f} times as many tokens are computed")
    return _result(replace(W1, name="W1 of five keys"), results, {})


def bench_w2(runs: Runs) -> Result:
    """Three times as many conversations as slots, pauses between turns, a small host cache."""
    cases = (*runs.rivals, LEAST_BUSY, STICKY, WITHOUT_FILES, AFFINITY)
    deployments = [case.with_flags(SMALL_CACHE) for case in cases]
    *_, sticky, _, ours = deployments
    results = _interleaved(deployments, runs, W2, runs.repeats)
    _show(W2, results)
    new = statistics.mean(result.prefilled / result.new for result in results[ours])
    tokens = _ratios(results, sticky, ours, lambda result: result.prefilled)
    first = _ratios(results, sticky, ours, _first_token_s)
    goals = {
        f"W2: at most 1.25 times the tokens that are new ({new:.2f})": new <= 1.25,
        f"W2: 1.8 times fewer than sticky sessions ({_spread(tokens)})": statistics.median(tokens)
        >= 1.8,
        f"W2: first token 1.5 times sooner than sticky ({_spread(first)})": statistics.median(first)
        >= 1.5,
        **_rival_goals(W2, results, ours),
    }
    return _result(W2, results, goals)


def bench_w3(runs: Runs) -> Result:
    """One system prompt for all conversations: it must not leave an engine idle."""
    results = _interleaved([LEAST_BUSY, AFFINITY], runs, W3, runs.repeats)
    _show(W3, results)
    counts = [result.decoded for result in results[AFFINITY]]
    both = all(len(count) == 2 for count in counts)
    worst = max(max(count.values()) / min(count.values()) for count in counts)
    print(f"busiest to least busy engine, the worst of {runs.repeats} runs: {worst:.2f}")
    goals = {f"W3: busiest to least busy engine under 1.5 ({worst:.2f})": both and worst < 1.5}
    return _result(W3, results, goals)


def bench_w4(runs: Runs) -> Result:
    """One engine is killed half-way; requests that fail with it are retried."""
    half = W4.conversations * W4.turns // 2
    unharmed = replace(AFFINITY, name="affinity, nothing killed")

    def kill(deployment: Deployment, corral: CorralCli, count: int) -> None:
        if count == half and deployment != unharmed:
            model_status = corral.data("status")["models"][0]
            os.kill(model_status["instances"][0]["pid"], signal.SIGKILL)

    deployments = [LEAST_BUSY, unharmed, WITHOUT_FILES, AFFINITY]
    results = _interleaved(deployments, runs, W4, runs.repeats, kill)
    _show(W4, results)
    broken = max(len(result.failures) for result in results[AFFINITY])
    lost = _ratios(results, AFFINITY, unharmed, lambda result: result.prefilled)
    goals = {
        f"W4: at most {W4.clients} failed attempts ({broken})": broken <= W4.clients,
        f"W4: 1.2 times the tokens without the kill ({_spread(lost)})": statistics.median(lost)
        <= 1.2,
    }
    return _result(W4, results, goals)


def bench_w5(runs: Runs) -> Result:
    """Nothing is shared: the cost of affinity where it cannot save anything."""
    results = _interleaved([LEAST_BUSY, WITHOUT_FILES, AFFINITY], runs, W5, runs.repeats)
    _show(W5, results)
    cost = statistics.median(_ratios(results, AFFINITY, LEAST_BUSY, _wall_s))
    files = statistics.median(_ratios(results, AFFINITY, WITHOUT_FILES, _wall_s))
    print(f"affinity takes {cost:.3f} times as long (median of {runs.repeats} pairs)")
    goals = {
        f"W5: a cost of at most 2 % ({cost - 1:.1%})": cost <= 1.02,
        f"W5: slot files cost at most 2 % of it ({files - 1:.1%})": files <= 1.02,
    }
    return _result(W5, results, goals)


def bench_w7(runs: Runs) -> Result:
    """Three clients per slot: the queue is never empty, and owners have no free slot."""
    results = _interleaved([LEAST_BUSY, WITHOUT_FILES, AFFINITY], runs, W7, runs.repeats)
    _show(W7, results)
    failed = [reason for result in results[AFFINITY] for reason in result.failures]
    tokens = _ratios(results, LEAST_BUSY, AFFINITY, lambda result: result.prefilled)
    wall = _ratios(results, AFFINITY, LEAST_BUSY, _wall_s)
    goals = {
        f"W7: nothing fails ({failed[:1]})": not failed,
        f"W7: 1.5 times fewer tokens than least busy ({_spread(tokens)})": statistics.median(tokens)
        >= 1.5,
        f"W7: no longer than least busy ({_spread(wall)})": statistics.median(wall) <= TIME_NOISE,
    }
    return _result(W7, results, goals)


def bench_w9(runs: Runs) -> Result:
    """One engine runs for a quarter of the time: conversations shared by speed, or equally."""
    results = _interleaved([EQUAL, BY_SPEED], runs, W9, runs.repeats)
    _show(W9, results)
    p95 = _ratios(results, EQUAL, BY_SPEED, _first_token_p95_s)
    print(f"first token, 95th percentile: equal weights take {_spread(p95)} times as long")
    return _result(W9, results, {})


def bench_w10(runs: Runs) -> Result:
    """Long system prompts: each is computed once on the machine, not once for each engine."""
    deployments = [*runs.rivals, WITHOUT_FILES, AFFINITY]
    workload = replace(W10, system_words=W10.system_words // 5) if runs.is_tiny else W10
    results = _interleaved(deployments, runs, workload, runs.repeats)
    _show(workload, results)
    repeated = [result.prefilled / result.distinct for result in results[AFFINITY]]
    first = _ratios(results, AFFINITY, WITHOUT_FILES, _first_token_s)
    goals = {
        f"W10: at most 1.15 times the distinct tokens ({_spread(repeated)})": max(repeated) <= 1.15,
        f"W10: first token at most 0.6 of that without slot files ({_spread(first)})": (
            statistics.median(first) <= 0.6
        ),
    }
    return _result(workload, results, goals)


def _rival_goals(workload: Workload, results: Results, ours: Deployment) -> dict[str, bool]:
    """Return the goals beside hearth, which computes no prefix twice: it has one slot."""
    hearth = next((case for case in results if case.policy == HEARTH.policy), None)
    if hearth is None:
        return {}
    tokens = _ratios(results, ours, hearth, lambda result: result.prefilled)
    first = _ratios(results, ours, hearth, _first_token_s)
    wall = _ratios(results, ours, hearth, _wall_s)
    name = workload.name
    return {
        f"{name}: at most 1.08 times hearth's tokens ({_spread(tokens)})": (
            statistics.median(tokens) <= 1.08
        ),
        f"{name}: at most 1.2 times hearth's tokens with each seed": max(tokens) <= 1.2,
        f"{name}: first token at most 0.40 of hearth's ({_spread(first)})": (
            statistics.median(first) <= 0.40
        ),
        f"{name}: at most 0.75 of hearth's time ({_spread(wall)})": (
            statistics.median(wall) <= 0.75
        ),
    }


BENCHES: Mapping[str, Callable[[Runs], Result]] = {
    "W1": bench_w1,
    "W2": bench_w2,
    "W3": bench_w3,
    "W4": bench_w4,
    "W5": bench_w5,
    "W7": bench_w7,
    "W9": bench_w9,
    "W10": bench_w10,
    "keys": bench_keys,
}

Results = Mapping[Deployment, Sequence[WorkloadResult]]


def _interleaved(
    deployments: Sequence[Deployment],
    runs: Runs,
    workload: Workload,
    rounds: int,
    meanwhile: Callable[[Deployment, CorralCli, int], None] = lambda *_: None,
) -> dict[Deployment, list[WorkloadResult]]:
    """Run every deployment once per round; all runs of a round share a seed.

    `meanwhile` is called after each answer with the number of answers so far.
    """
    results: dict[Deployment, list[WorkloadResult]] = {deployment: [] for deployment in deployments}
    for number in range(rounds):
        seed = runs.first_seed + number
        for deployment in deployments if number % 2 == 0 else reversed(deployments):
            after_each = partial(meanwhile, deployment)
            result = run(deployment, runs.model, workload, seed, after_each)
            results[deployment].append(result)
            label = f"{workload.name} seed {seed}, {deployment.name}"
            print(
                f"{label}: {result.prefilled} tokens, {result.new} new, {result.distinct} distinct",
                file=sys.stderr,
            )
    return results


def _result(workload: Workload, results: Results, goals: Mapping[str, bool]) -> Result:
    """Return the figures; times are multiples of the last deployment's, run by run."""
    *_, ours = results
    values: Mapping[tuple[str, str], Callable[[WorkloadResult], float]] = {
        ("prompt tokens computed", "tokens"): lambda entry: entry.prefilled,
        ("of these new", "tokens"): lambda entry: entry.new,
        ("of these distinct", "tokens"): lambda entry: entry.distinct,
        ("prompt from the cache", "%"): lambda entry: 100 * entry.cached_share,
        ("first token, mean", "s"): _first_token_s,
        ("first token, 95th percentile", "s"): _first_token_p95_s,
        ("all of it", "s"): _wall_s,
    }
    return Result(
        [
            Figure(
                f"{workload.name}: {name}",
                unit,
                {result.name: [value(run) for run in runs] for result, runs in results.items()},
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
    heads = ("tokens computed", "of new", "repeated", "cached", "first token", "wall", "failed")
    print("{:30} {:>24} {:>7} {:>8} {:>7} {:>18} {:>18} {:>7}".format("", *heads))
    for deployment, runs in results.items():
        prefilled = [result.prefilled for result in runs]
        repeated = statistics.mean(result.prefilled / result.distinct for result in runs)
        of_new = statistics.mean(result.prefilled / result.new for result in runs)
        cached = statistics.mean(result.cached_share for result in runs)
        broken = sum(len(result.failures) for result in runs)
        first = _spread(_ratios(results, deployment, ours, _first_token_s))
        wall = _spread(_ratios(results, deployment, ours, _wall_s))
        mean = f"{statistics.mean(prefilled):.0f} ({min(prefilled)} to {max(prefilled)})"
        shares = f"{of_new:7.2f} {repeated:8.2f} {cached:7.3f}"
        print(f"{deployment.name:30} {mean:>24} {shares} {first:>18} {wall:>18} {broken:7}")
    print(f"\nfirst token and wall are multiples of ours; ours took {_seconds(results[ours])}")


def _ratios(
    results: Results,
    deployment: Deployment,
    other: Deployment,
    figure: Callable[[WorkloadResult], float],
) -> list[float]:
    pairs = zip(results[deployment], results[other], strict=True)
    return [figure(result) / figure(base) for result, base in pairs]


def _wall_s(result: WorkloadResult) -> float:
    return result.wall_s


def _first_token_s(result: WorkloadResult) -> float:
    return statistics.mean(answer.first_token_s for answer in result.answers)


def _first_token_p95_s(result: WorkloadResult) -> float:
    return statistics.quantiles((answer.first_token_s for answer in result.answers), n=20)[-1]


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
