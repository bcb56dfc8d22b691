"""Compare pauses of streams while long prompts arrive, with `prefer_pure_decode` and without.

Four clients stream one answer after another. Prompts of 2 000 tokens arrive at fixed times, each a
new conversation. A gap is the time between two tokens of one answer, of the four streams together.
Each round starts one daemon for each variant, in a random order, with the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

USUAL, PURE = "without", "prefer_pure_decode"
GOAL: Final = 0.5
STREAMS: Final = 4
SETTLED_S: Final = 3.0
STREAM_TOKENS: Final = 1200
PROMPT_WORDS: Final = 2400  # more tokens than are taken of them
PROMPT_TOKENS: Final = 2000
ANSWER_TOKENS: Final = 8
# Nothing adapts, so that every daemon runs the same.
SETTINGS: Final = """
[models.m]
path = "{model}"
[models.m.batching]
max_sbatch_sequences = 6
max_context_length = 4096
prefer_pure_decode = {pure}
"""


@dataclass
class Seen:
    """The results of one daemon, in seconds; `tokens` are those of the streams."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0


def main() -> int:
    """Measure, print, and return 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4, help="of each variant and round")
    parser.add_argument("--every", type=float, default=8.0, metavar="S", help="between two prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = pinned.find_pin("smollm2").path(directories().models)
    rounds: list[Mapping[str, Mapping[str, float]]] = []
    for number in range(options.repeats):
        order = random.Random(number).sample([USUAL, PURE], 2)  # noqa: S311 (an order)
        rounds.append(
            {
                name: figures(_measure(model, name, number, options.prompts, options.every))
                for name in order
            }
        )
        result(rounds).write(options.json)  # in case the next round is cut short
        print(f"round {number + 1} of {options.repeats}: {rounds[-1]}", file=sys.stderr)
    found = result(rounds)
    for goal, is_met in found.goals.items():
        print(f"{'ok' if is_met else 'missed'}: {goal}")
    for figure in found.figures:
        ratios = [
            _ratio(figure.values[PURE][at], figure.values[USUAL][at]) for at in range(len(rounds))
        ]
        print(f"{figure.name}: {_spread(ratios)} of without")
    return 1 if found.missed else 0


def _measure(model: Path, name: str, seed: int, prompts: int, every_s: float) -> Seen:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home), measure_threads=True)
        corral.configure(SETTINGS.format(model=model, pure=str(name == PURE).lower()))
        try:
            corral.ok("start")
            return asyncio.run(_observe(corral.url, seed, prompts, every_s))
        finally:
            corral.end()


async def _observe(url: str, seed: int, prompts: int, every_s: float) -> Seen:
    seen, is_over = Seen(), asyncio.Event()
    rng = random.Random(seed)  # noqa: S311 (texts)
    async with session(url) as http, asyncio.TaskGroup() as group:
        texts = [await _text(http, rng) for _ in range(prompts)]
        for at in range(STREAMS):
            group.create_task(_stream(http, at, seen, is_over))
        await asyncio.sleep(SETTLED_S)
        seen.gaps_s.clear()
        seen.tokens = 0
        for text in texts:
            group.create_task(_prompt(http, text, seen))
            await asyncio.sleep(every_s)
        is_over.set()
    return seen


async def _text(http: aiohttp.ClientSession, rng: random.Random) -> str:
    """Return a prompt of so many tokens."""
    words = {"model": "m", "content": " ".join(rng.choices(WORDS, k=PROMPT_WORDS))}
    async with http.post("/tokenize", json=words) as response:
        tokens = (await response.json())["tokens"][:PROMPT_TOKENS]
    async with http.post("/detokenize", json={"model": "m", "tokens": tokens}) as response:
        text: str = (await response.json())["content"]
    return text


async def _stream(http: aiohttp.ClientSession, at: int, seen: Seen, is_over: asyncio.Event) -> None:
    """Stream one answer after another."""
    for turn in itertools.count():
        before_s: float | None = None
        body = _body(f"Story {at}.{turn}", STREAM_TOKENS)
        async with http.post("/v1/completions", json=body) as response:
            async for line in response.content:
                if is_over.is_set():
                    return
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    if before_s is not None:
                        seen.gaps_s.append(now_s - before_s)
                    before_s = now_s
                    seen.tokens += 1


async def _prompt(http: aiohttp.ClientSession, text: str, seen: Seen) -> None:
    began_at_s, is_first = time.monotonic(), True
    async with http.post("/v1/completions", json=_body(text, ANSWER_TOKENS)) as response:
        async for line in response.content:
            if line.startswith(b"data: {") and is_first:
                is_first = False
                seen.first_s.append(time.monotonic() - began_at_s)


def _body(text: str, tokens: int) -> Mapping[str, object]:
    return {
        "model": "m",
        "prompt": text,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def figures(seen: Seen) -> Mapping[str, float]:
    """Return the figures of one daemon, by name."""
    gaps_s = sorted(seen.gaps_s)
    return {
        "gap, p99": 1000 * _quantile(gaps_s, 0.99),
        "gap, p50": 1000 * _quantile(gaps_s, 0.5),
        "longest gap": 1000 * gaps_s[-1],
        "first token of a prompt": 1000 * statistics.mean(seen.first_s),
        "tokens of the streams": seen.tokens,
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def result(rounds: Sequence[Mapping[str, Mapping[str, float]]]) -> Result:
    found = [
        Figure(
            name,
            "" if name.startswith("tokens") else "ms",
            {variant: [values[variant][name] for values in rounds] for variant in (USUAL, PURE)},
            base=USUAL,
        )
        for name in rounds[0][USUAL]
    ]
    gaps = found[0].values
    ratios = [_ratio(pure, usual) for usual, pure in zip(gaps[USUAL], gaps[PURE], strict=True)]
    goal = f"gap between two tokens, p99: {_spread(ratios)} of that without, at most {GOAL}"
    return Result(
        found,
        {goal: statistics.median(ratios) <= GOAL},
        notes=["SmolLM2, four streams; a prompt of 2 000 tokens every few seconds."],
    )


def _ratio(value: float, base: float) -> float:
    return value / base


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
