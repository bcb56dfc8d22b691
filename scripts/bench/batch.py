"""Compare prompts of one batch with the same one after another, and measure streams beside it.

SmolLM2 with 8 slots. In each round, in an order that alternates: 64 prompts through
`/v1/batch/completions`, and the same through `/completion` one by one; the first token of an
interactive stream alone, and of one that is repeated as long as a batch runs. Each prompt is new.
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
from corral_cli import CorralCli

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.host import download
from supervisor.host.paths import directories

ONE_BY_ONE, BATCH = "one after another", "one batch"
ALONE, BESIDE = "alone", "beside a batch"
SLOTS: Final = 8
RATIO_MIN, FIRST_TOKEN_MAX = 2.0, 1.3
TOKENS, PROMPT_WORDS = 32, 12
_STREAMS, STREAM_WORDS, STREAM_TOKENS, PAUSE_S = 12, 120, 16, 0.25
SETTINGS = """
[models.chat]
path = "{path}"
flags = {{ parallel = {slots}, ctx-size = {ctx} }}
"""


class Round:
    """The measurements of one round on a daemon."""

    def __init__(self, http: aiohttp.ClientSession, seed: int, prompts: int) -> None:
        self._http = http
        self._rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
        self._count = prompts

    async def one_by_one(self) -> float:
        """Return tokens per second."""
        prompts, began_at_s, tokens = self._prompts(), time.monotonic(), 0
        for prompt in prompts:
            body = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True}
            answer = await self._post("/completion", {**body, "temperature": 0})
            tokens += answer["tokens_predicted"]
        return tokens / (time.monotonic() - began_at_s)

    async def batch(self) -> float:
        """Return tokens per second."""
        body = {"prompts": self._prompts(), "max_tokens": TOKENS, "ignore_eos": True}
        began_at_s = time.monotonic()
        answer = await self._post("/v1/batch/completions", body)
        if any("error" in one for one in answer["results"]):
            raise RuntimeError("a prompt failed")
        return float(answer["stats"]["total_tokens"]) / (time.monotonic() - began_at_s)

    async def alone(self) -> float:
        """Return the mean time to the first token, in seconds."""
        return statistics.mean([await self._first_token_s() for _ in range(_STREAMS)])

    async def beside(self) -> float:
        """Return the mean time to the first token while a batch runs, in seconds."""
        times = [await self._first_token_s()]  # interactive requests were there before
        times.clear()
        async with asyncio.TaskGroup() as group:
            batch = group.create_task(self.batch())
            await asyncio.sleep(PAUSE_S)
            while not batch.done():
                times.append(await self._first_token_s())
        return statistics.mean(times)

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

    def _prompts(self) -> list[str]:
        return [" ".join(self._rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(self._count)]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._http.post(path, json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


def main() -> int:
    """Print the figures; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--quick", action="store_true", help="one round of 16 prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = download.fetch(download.find_pin("smollm2"), directories().models, lambda *_: None)
    prompts, repeats = (16, 1) if options.quick else (64, options.repeats)
    with _serving(model) as corral:
        found = asyncio.run(_measure(corral.url, prompts, repeats))
    _print(found)
    found.write(options.json)
    return 1 if found.missed else 0


@contextmanager
def _serving(model: Path) -> Iterator[CorralCli]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(SETTINGS.format(path=model, slots=SLOTS, ctx=SLOTS * 1024))
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
            steps = [
                (speeds[ONE_BY_ONE], run.one_by_one),
                (speeds[BATCH], run.batch),
                (firsts[ALONE], run.alone),
                (firsts[BESIDE], run.beside),
            ]
            for values, step in steps if number % 2 == 0 else reversed(steps):
                values.append(await step())
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
    return [one / other for one, other in zip(values, base, strict=True)]


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _print(found: Result) -> None:
    for figure in found.figures:
        for variant, values in figure.values.items():
            shown = ", ".join(f"{one:.3g}" for one in values)
            print(f"{figure.name}, {variant}: {shown} {figure.unit}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")


if __name__ == "__main__":
    sys.exit(main())
