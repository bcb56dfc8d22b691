"""Compare prompts of one batch with the same one after another, and measure streams beside it.

SmolLM2 with 8 slots, those of two replicas unless told otherwise, each with as many threads as
decode fastest (`corral plan`). In each round: 64 prompts through `/v1/batch/completions`, and
before and after them 32 through `/completion` one by one; then the first token of an interactive
stream that is repeated as long as a batch runs, and before and after it that of a few alone. Each
prompt is new.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

ONE_BY_ONE, BATCH = "one after another", "one batch"
ALONE, BESIDE = "alone", "beside a batch"
SLOTS: Final = 8
RATIO_MIN, FIRST_TOKEN_MAX = 2.0, 1.3
TOKENS, PROMPT_WORDS = 32, 12
STREAMS, STREAM_WORDS, STREAM_TOKENS, PAUSE_S = 6, 120, 16, 0.25
SETTINGS = """
[models.chat]
path = "{path}"
replicas = {replicas}
flags = {{ parallel = {slots}, ctx-size = {ctx} }}
"""


class Round:
    """The measurements of one round on a daemon."""

    def __init__(self, http: aiohttp.ClientSession, seed: int, prompts: int) -> None:
        self._http = http
        self._rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
        self._count = prompts

    async def speeds(self) -> tuple[float, float]:
        """Return tokens per second one after another, and of a batch."""
        before_s = await self._one_by_one(self._count // 2)
        batch = await self.batch()
        after_s = await self._one_by_one(self._count // 2)
        return self._count // 2 * 2 * TOKENS / (before_s + after_s), batch

    async def first_tokens(self) -> tuple[float, float]:
        """Return the mean time to a stream's first token, in seconds, alone and beside a batch."""
        before, beside, after = await self._alone(), await self._beside(), await self._alone()
        return statistics.mean([*before, *after]), statistics.mean(beside)

    async def _one_by_one(self, count: int) -> float:
        """Return the seconds that so many prompts take."""
        prompts, began_at_s = self._prompts(count), time.monotonic()
        for prompt in prompts:
            body = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "temperature": 0}
            await self._post("/completion", body)
        return time.monotonic() - began_at_s

    async def batch(self) -> float:
        """Return its tokens per second."""
        body = {"prompts": self._prompts(self._count), "max_tokens": TOKENS, "ignore_eos": True}
        began_at_s = time.monotonic()
        answer = await self._post("/v1/batch/completions", body)
        if any("error" in result for result in answer["results"]):
            raise RuntimeError("a prompt failed")
        return float(answer["stats"]["total_tokens"]) / (time.monotonic() - began_at_s)

    async def _alone(self) -> list[float]:
        return [await self._first_token_s() for _ in range(STREAMS)]

    async def _beside(self) -> list[float]:
        times: list[float] = []
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(self.batch())
            await asyncio.sleep(PAUSE_S)
            while not batch.done():
                times.append(await self._first_token_s())
        return times

    async def _first_token_s(self) -> float:
        """Stream an answer to its end; return when its first token arrived."""
        content = " ".join(self._rng.choices(WORDS, k=STREAM_WORDS))
        body = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "stream": True,
        }
        began_at_s, first_s = time.monotonic(), 0.0
        async with self._http.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not first_s and b'"content":"' in line and b'"content":""' not in line:
                    first_s = time.monotonic() - began_at_s
        await asyncio.sleep(PAUSE_S)
        return first_s

    def _prompts(self, count: int) -> list[str]:
        return [" ".join(self._rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(count)]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(path, json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def main() -> int:
    """Print the figures; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument(
        "--replicas", type=int, choices=(1, 2, 4), default=2, help="that share the 8 slots"
    )
    parser.add_argument("--quick", action="store_true", help="one round of 16 prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
    prompts, repeats = (16, 1) if options.quick else (64, options.repeats)
    with _serving(model, options.replicas) as corral:
        found = asyncio.run(_measure(corral.url, prompts, repeats))
    _print(found)
    found.write(options.json)
    return 1 if found.missed else 0


@contextmanager
def _serving(model: Path, replicas: int) -> Iterator[CorralCli]:
    slots = SLOTS // replicas
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home), measure_threads=True)
        corral.configure(
            SETTINGS.format(path=model, replicas=replicas, slots=slots, ctx=slots * 1024)
        )
        corral.ok("start")
        try:
            yield corral
        finally:
            corral.end()


async def _measure(url: str, prompts: int, repeats: int) -> Result:
    speeds: dict[str, list[float]] = {ONE_BY_ONE: [], BATCH: []}
    firsts: dict[str, list[float]] = {ALONE: [], BESIDE: []}
    async with session(url) as http:
        for number in range(repeats):
            run = Round(http, number, prompts)
            for figures, found in (
                (speeds, await run.speeds()),
                (firsts, await run.first_tokens()),
            ):
                for values, value in zip(figures.values(), found, strict=True):
                    values.append(value)
    return _result(speeds, firsts)


def _result(speeds: dict[str, list[float]], firsts: dict[str, list[float]]) -> Result:
    faster = _ratios(speeds[BATCH], speeds[ONE_BY_ONE])
    later = _ratios(firsts[BESIDE], firsts[ALONE])
    speed_goal = f"a batch is at least {RATIO_MIN} times as fast: {_spread(faster)}"
    wait_goal = f"a stream beside it waits at most {FIRST_TOKEN_MAX} times: {_spread(later)}"
    return Result(
        [
            Figure("tokens per second of all", "tokens/s", speeds, ONE_BY_ONE),
            Figure("first token of a stream, mean", "s", firsts, ALONE),
        ],
        {
            speed_goal: statistics.median(faster) >= RATIO_MIN,
            wait_goal: statistics.median(later) <= FIRST_TOKEN_MAX,
        },
    )


def _ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, base, strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _print(found: Result) -> None:
    for figure in found.figures:
        for variant, values in figure.values.items():
            shown = ", ".join(f"{value:.3g}" for value in values)
            print(f"{figure.name}, {variant}: {shown} {figure.unit}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")


if __name__ == "__main__":
    sys.exit(main())
