"""Compare the profiles with llama-server's own defaults, interleaved in one run.

Each round starts every variant once, in an order of its own. Rates of one client come from the
engine's `timings`, rates of several clients from the wall clock. Rounds are compared pair by pair,
as ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from corral_cli import CorralCli, until

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.overhead_fronts import free_port
from supervisor.engines.discover import Engine, load
from supervisor.host import download
from supervisor.host.paths import directories

PLAIN: Final = "plain"
TOKENS: Final = 96
PROMPT_WORDS: Final = 700
FIGURES: Final = ("decode", "prefill", "4 clients", "8 clients")
# A profile is as fast as plain at these, or this many times as fast.
GOALS: Final[Mapping[str, Mapping[str, float]]] = {
    "base": {"decode": 1.0, "prefill": 1.0, "4 clients": 1.0},
    "low-latency": {"decode": 1.0},
    "high-throughput": {"8 clients": 1.15},
}


def main() -> int:
    """Measure, print, and return 1 if a profile is slower than its goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="keep one core busy meanwhile")
    options = parser.parse_args()
    model = download.find_pin("smollm2").path(directories().models)
    variants = {PLAIN: partial(plain, model)}
    variants |= {name: partial(corral, model, name) for name in GOALS}
    rounds: list[Mapping[str, Mapping[str, float]]] = []
    with busy_core() if options.busy else nullcontext():
        for number in range(options.repeats):
            order = random.Random(number).sample([*variants], len(variants))  # noqa: S311 (an order)
            rounds.append({name: measured(variants[name]()) for name in order})
            print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
    missed = show(rounds)
    for goal in missed:
        print(f"missed: {goal}")
    return 1 if missed else 0


@contextmanager
def corral(model: Path, profile: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        cli = CorralCli(Path(home))
        cli.configure(f'[models.m]\npath = "{model}"\nprofile = "{profile}"\n')
        cli.ok("start")
        try:
            yield cli.url
        finally:
            cli.end()


@contextmanager
def plain(model: Path) -> Iterator[str]:
    """The engine with nothing but the model and an address."""
    engine: Engine = load(None, cache_dir=directories().cache)
    port = free_port()
    libraries = ":".join(map(str, engine.library_dirs))
    process = subprocess.Popen(
        [engine.path, "--model", model, "--alias", "m", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **({"LD_LIBRARY_PATH": libraries} if libraries else {})},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: asyncio.run(is_healthy(url)))
        yield url
    finally:
        process.terminate()
        process.wait()


async def is_healthy(url: str) -> bool:
    try:
        async with session(url) as http, http.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


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
        long = [
            await answer(http, " ".join(rng.choices(WORDS, k=PROMPT_WORDS)), 1) for _ in range(2)
        ]
        return {
            "decode": max(one["predicted_per_second"] for one in alone),
            "prefill": max(one["prompt_per_second"] for one in long),
            "4 clients": await together(http, 4),
            "8 clients": await together(http, 8),
        }


async def together(http: aiohttp.ClientSession, clients: int) -> float:
    """Generated tokens of all clients per second, two answers for each."""

    async def client(number: int) -> int:
        answers = [await answer(http, f"Story {number}.{turn}", TOKENS) for turn in range(2)]
        return sum(one["predicted_n"] for one in answers)

    began_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client(number)) for number in range(clients)]
    return sum(task.result() for task in tasks) / (time.monotonic() - began_at_s)


async def answer(http: aiohttp.ClientSession, text: str, tokens: int) -> Mapping[str, Any]:
    """The engine's `timings` of one answer of exactly so many tokens."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        content: dict[str, Any] = await response.json()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {content}")
    timings: dict[str, Any] = content["timings"]
    return timings


def show(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Print tokens per second and ratios to plain; return the goals that were missed."""
    print(("{:16}" + " {:>28}" * len(FIGURES)).format("tokens/s", *FIGURES))
    missed = []
    for name in (PLAIN, *GOALS):
        cells = []
        for figure in FIGURES:
            ratios = [one[name][figure] / one[PLAIN][figure] for one in rounds]
            median = statistics.median(one[name][figure] for one in rounds)
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{median:.0f}, {spread}" if name != PLAIN else f"{median:.0f}")
            goal = GOALS.get(name, {}).get(figure)
            if goal and max(ratios) < goal:
                missed.append(f"{name}, {figure}: {spread} of plain, at least {goal:g}")
        print(("{:16}" + " {:>28}" * len(FIGURES)).format(name, *cells))
    return missed


if __name__ == "__main__":
    sys.exit(main())
