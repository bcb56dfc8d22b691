"""Measure interactive streams beside batch requests that yield the only slot to them.

SmolLM2 with one slot and one thread. The same greedy batch requests are sent to three new daemons:
with interactive streams beside them, with streams while `batch_yields` is off, and alone. After
each stream there is a pause, as of a person who reads. Each answer must be the one given alone: the
engines compute the same, as every other prompt shares nothing but the template.
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

YIELDS, RUNS_ON, ALONE = "beside a batch", "without yields", "alone"
SPEED_MIN, FIRST_TOKEN_MAX = 0.9, 1.15
TOKENS, WORD_COUNT, STREAM_TOKENS = 300, 12, 16
PAUSES_S: Final = (0.5, 6.0)
SETTINGS = """
[models.chat]
path = "{path}"
flags = {{ parallel = 1, ctx-size = 4096, threads = 1, threads-batch = 1 }}
[proxy]
listen = "127.0.0.1:0"
batch_yields = {yields}
"""


@dataclass
class Run:
    """What one daemon did; `busy_s` is the time of the streams from first to last byte."""

    answers: list[str] = field(default_factory=list)
    took_s: float = 0.0
    busy_s: float = 0.0
    first_s: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second of the batch, in the time that the streams left."""
        return len(self.answers) * TOKENS / (self.took_s - self.busy_s)


async def run(http: aiohttp.ClientSession, lines: int, *, has_streams: bool) -> Run:
    found, rng = Run(), random.Random(1)  # noqa: S311 (a workload, no secret)
    prompts = [" ".join(rng.choices(WORDS, k=WORD_COUNT)) for _ in range(lines)]
    await _stream(http, rng, Run())  # loads the model
    async with asyncio.TaskGroup() as group:
        batch = group.create_task(_batch(http, prompts, found))
        while has_streams and not batch.done():
            await asyncio.sleep(rng.uniform(*PAUSES_S))
            if not batch.done():
                await _stream(http, rng, found)
    return found


async def _batch(http: aiohttp.ClientSession, prompts: Sequence[str], found: Run) -> None:
    began_at_s = time.monotonic()
    for prompt in prompts:
        body = {**_chat(prompt, TOKENS), "service_tier": "flex"}
        async with http.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
            found.answers.append(answer["choices"][0]["message"]["content"])
    found.took_s = time.monotonic() - began_at_s


async def _stream(http: aiohttp.ClientSession, rng: random.Random, found: Run) -> None:
    body = {**_chat(" ".join(rng.choices(WORDS, k=10 * WORD_COUNT)), STREAM_TOKENS), "stream": True}
    began_at_s, first_s = time.monotonic(), 0.0
    async with http.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not first_s and b'"content":"' in line and b'"content":""' not in line:
                first_s = time.monotonic() - began_at_s
    found.first_s.append(first_s)
    found.busy_s += time.monotonic() - began_at_s


def _chat(text: str, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


@contextmanager
def _serving(model: Path, *, yields: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(SETTINGS.format(path=model, yields=str(yields).lower()))
        corral.ok("start")
        try:
            yield corral.url
        finally:
            corral.end()


async def _measure(url: str, lines: int, streams: int, *, beside: bool) -> Run:
    async with session(url) as http:
        if beside or not streams:
            return await run(http, lines, has_streams=beside)
        found, rng = Run(), random.Random(2)  # noqa: S311 (as above)
        for _ in range(streams + 1):
            await _stream(http, rng, found)
        del found.first_s[0]  # that loaded the model
        return found


def main() -> int:
    """Print the figures; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=100, metavar="N", help="batch requests")
    parser.add_argument("--quick", action="store_true", help="8 batch requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    lines = 8 if options.quick else options.lines
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
    runs: dict[str, Run] = {}
    for name, yields, beside in (
        (YIELDS, True, True),
        (RUNS_ON, False, True),
        (ALONE, True, False),
    ):
        with _serving(model, yields=yields) as url:
            runs[name] = asyncio.run(_measure(url, lines, 0, beside=beside))
    with _serving(model, yields=True) as url:
        idle = asyncio.run(_measure(url, 0, len(runs[YIELDS].first_s), beside=False))
    found = _result(runs, idle)
    for figure in found.figures:
        for variant, values in figure.values.items():
            print(f"{figure.name}, {variant}: {values[0]:.3g} {figure.unit}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


def _result(runs: dict[str, Run], idle: Run) -> Result:
    firsts = {name: runs[name].first_s for name in (YIELDS, RUNS_ON)} | {ALONE: idle.first_s}
    late = {name: [_percentile(times, 0.99)] for name, times in firsts.items()}
    speeds = {name: [runs[name].speed] for name in (YIELDS, ALONE)}
    equal = sum(map(str.__eq__, runs[YIELDS].answers, runs[ALONE].answers))
    later, kept = late[YIELDS][0] / late[ALONE][0], speeds[YIELDS][0] / speeds[ALONE][0]
    lines = len(runs[ALONE].answers)
    return Result(
        [
            Figure("first token of a stream, 99th percentile", "s", late, ALONE),
            Figure(
                "first token of a stream, median",
                "s",
                {name: [statistics.median(times)] for name, times in firsts.items()},
                ALONE,
            ),
            Figure("batch in the time that streams leave", "tokens/s", speeds, ALONE),
        ],
        {
            f"a stream waits at most {FIRST_TOKEN_MAX} times: {later:.2f}": later
            <= FIRST_TOKEN_MAX,
            f"a batch keeps {SPEED_MIN} of its speed: {kept:.2f}": kept >= SPEED_MIN,
            f"all answers are those given alone: {equal} of {lines}": equal == lines,
        },
    )


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


if __name__ == "__main__":
    sys.exit(main())
