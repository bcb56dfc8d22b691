"""Compare the profiles with llama-server's own defaults, interleaved in one run.

Each round starts every variant once, in a random order. Rates of one client come from the
engine's `timings`, rates of several clients from the wall clock. Rounds are compared pair by pair,
as ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Final

from support.corral_cli import CorralCli, until

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.plain_engine import plain
from scripts.bench.rates import TOKENS, answer, together
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

Rounds = Sequence[Mapping[str, Mapping[str, float]]]
Goals = Mapping[str, Mapping[str, float]]

PLAIN: Final = "plain"
PROMPT_WORDS: Final = 700
FIGURES: Final = ("decode", "prefill", "4 clients", "8 clients")
# A profile is as fast as plain at these, or this many times as fast.
GOALS: Final[Goals] = {
    "base": {"decode": 1.0, "prefill": 1.0, "4 clients": 1.0},
    "low-latency": {"decode": 1.0},
    "high-throughput": {"8 clients": 1.15},
}
# Beside a busy program, once the threads have given way to it, in this time at most.
BUSY_GOALS: Final[Goals] = {"base": {"decode": 1.5}}
ADAPTED_WITHIN_S: Final = 120


def main() -> int:
    """Measure, print, and return 1 if a profile is slower than its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = pinned.find_pin("smollm2").path(directories().models)
    goals = BUSY_GOALS if options.busy else GOALS
    adapted_within_s = ADAPTED_WITHIN_S if options.busy else 0
    variants = {PLAIN: partial(plain, "--model", model, "--alias", "m")}
    rounds: list[Mapping[str, Mapping[str, float]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="corral-") as cache,
        busy_core() if options.busy else nullcontext(),
    ):
        variants |= {name: partial(corral, model, name, cache, adapted_within_s) for name in goals}
        for number in range(options.repeats):
            order = random.Random(number).sample([*variants], len(variants))  # noqa: S311 (an order)
            rounds.append({name: measured(variants[name]()) for name in order})
            result(rounds, goals).write(options.json)  # in case the next round is cut short
            print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
    show(rounds, goals)
    found = result(rounds, goals)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


@contextmanager
def corral(model: Path, profile: str, cache: str, adapted_within_s: float) -> Iterator[str]:
    """Serve with a profile, with adapted values if there are any in time.

    The first start with an empty cache measures thread counts.
    """
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        cli = CorralCli(Path(home), measure_threads=True, adaptive=True)
        cli.env["XDG_CACHE_HOME"] = cache
        cli.configure(f'[models.m]\npath = "{model}"\nprofile = "{profile}"\n')
        cli.ok("start")
        try:
            if adapted_within_s:
                with suppress(AssertionError):
                    until(lambda: cli.status().models[0].adapted, within_s=adapted_within_s)
            yield cli.url
        finally:
            cli.end()


@contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measured(serving: AbstractContextManager[str]) -> Mapping[str, float]:
    """Tokens per second of one start, by figure."""
    with serving as url:
        return asyncio.run(figures(url))


async def figures(url: str) -> Mapping[str, float]:
    rng = random.Random(1)  # noqa: S311 (words of a prompt)
    async with session(url) as http:
        await answer(http, "Hello.", 8)  # the first request of a process is slower
        alone = [await answer(http, "Tell me a story.", TOKENS) for _ in range(2)]
        # Whole prompts: the words of the chat template are 24 tokens, and a prompt that begins
        # behind as many cached ones takes 5 % longer (its batches end at other multiples of 256).
        long = [
            await answer(http, " ".join(rng.choices(WORDS, k=PROMPT_WORDS)), 1, reuses_cache=False)
            for _ in range(4)
        ]
        return {
            "decode": max(run["predicted_per_second"] for run in alone),
            "prefill": max(run["prompt_per_second"] for run in long),
            "4 clients": await together(http, 4),
            "8 clients": await together(http, 8),
        }


def result(rounds: Rounds, goals: Goals) -> Result:
    return Result(
        [
            Figure(
                figure,
                "tokens/s",
                {name: [values[name][figure] for values in rounds] for name in (PLAIN, *goals)},
                base=PLAIN,
            )
            for figure in FIGURES
        ],
        goals=dict(
            judged(f"{name}, {figure}", ratios(rounds, name, figure), goal)
            for name, wanted in goals.items()
            for figure, goal in wanted.items()
        ),
    )


def judged(what: str, found: Sequence[float], goal: float) -> tuple[str, bool]:
    return f"{what}: {spread(found)} of plain, at least {goal:g}", max(found) >= goal


def show(rounds: Rounds, goals: Goals) -> None:
    """Print tokens per second and ratios to plain."""
    print(("{:16}" + " {:>28}" * len(FIGURES)).format("tokens/s", *FIGURES))
    for name in (PLAIN, *goals):
        cells = []
        for figure in FIGURES:
            median = statistics.median(values[name][figure] for values in rounds)
            ratio = f", {spread(ratios(rounds, name, figure))}" if name != PLAIN else ""
            cells.append(f"{median:.0f}{ratio}")
        print(("{:16}" + " {:>28}" * len(FIGURES)).format(name, *cells))


def ratios(rounds: Rounds, name: str, figure: str) -> list[float]:
    return [values[name][figure] / values[PLAIN][figure] for values in rounds]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
