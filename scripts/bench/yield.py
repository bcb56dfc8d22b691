"""Measure interactive streams beside batch requests that yield the only slot to them.

SmolLM2 with one slot and one thread. The same greedy batch requests are sent to new daemons: with
interactive streams beside them, with streams while `batch_yields` is off (a quarter of them), and
alone. A last daemon gets the same streams with the same pauses, as of a person who reads, and no
batch request: the idle machine. A stream takes the engine from the batch in any case; in the ideal,
exactly the time that it takes on the idle machine. Each answer must be the one given alone: the
engines compute the same, as every other prompt shares nothing but the template.

A 99th percentile needs a hundred streams: with `--streams 120`, the batch has as many lines as
these take, and 120 more come to the idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

import aiohttp
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

BESIDE, RUNS_ON, ALONE = "beside each other", "without yields", "alone"
IDEAL = "beside each other, ideal"
SPEED_MIN, FIRST_TOKEN_MAX = 0.9, 1.15
TOKENS, STREAM_TOKENS = 300, 16
# The words of a batch request, unless an option says otherwise, and of a stream.
BATCH_WORDS, STREAM_WORDS = 12, 120
PAUSES_S: Final = (0.5, 6.0)
_LINES_MAX: Final = 10_000
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
    """The results of one daemon: answers and time of the batch, and times of the streams."""

    answers: list[str] = field(default_factory=list)
    took_s: float = 0.0
    first_s: list[float] = field(default_factory=list)
    stream_s: list[float] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens per second of the batch, pauses included."""
        return len(self.answers) * TOKENS / self.took_s


async def run(
    url: str,
    prompts: Iterable[str],
    streams: Callable[[Run], bool],
    pauses_s: tuple[float, float] = PAUSES_S,
    *,
    is_endless: bool = False,
) -> Run:
    """Send batch requests, and streams beside them as long as `streams` says so.

    If the batch `is_endless`, it ends with the streams.
    """
    found, rng = Run(), random.Random(2)  # noqa: S311 (a workload, no secret)
    if is_endless:
        prompts = takewhile(lambda _: streams(found), prompts)
    async with session(url) as http:
        await _stream(http, rng, Run())  # loads the model
        async with asyncio.TaskGroup() as group:
            group.create_task(_batch(http, prompts, found))
            while streams(found):
                await asyncio.sleep(rng.uniform(*pauses_s))
                if streams(found):
                    await _stream(http, rng, found)
    return found


async def _batch(http: aiohttp.ClientSession, prompts: Iterable[str], found: Run) -> None:
    began_at_s = time.monotonic()
    for prompt in prompts:
        body = {**_chat(prompt, TOKENS), "service_tier": "flex"}
        async with http.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = await response.json()
            found.answers.append(answer["choices"][0]["message"]["content"])
    found.took_s = time.monotonic() - began_at_s


async def _stream(http: aiohttp.ClientSession, rng: random.Random, found: Run) -> None:
    body = {**_chat(_words(rng, STREAM_WORDS), STREAM_TOKENS), "stream": True}
    began_at_s, first_s = time.monotonic(), 0.0
    async with http.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not first_s and b'"content":"' in line and b'"content":""' not in line:
                first_s = time.monotonic() - began_at_s
    found.first_s.append(first_s)
    found.stream_s.append(time.monotonic() - began_at_s)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _chat(text: str, tokens: int) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


@contextmanager
def _serving(model: Path, *, yields: bool = True) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(SETTINGS.format(path=model, yields=str(yields).lower()))
        corral.ok("start")
        try:
            yield corral.url
        finally:
            corral.end()


def main() -> int:
    """Print the figures; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lines", type=int, default=100, metavar="N", help="batch requests")
    parser.add_argument("--streams", type=int, metavar="N", help="the batch lasts for N streams")
    parser.add_argument(
        "--pauses",
        nargs=2,
        type=float,
        default=PAUSES_S,
        metavar="S",
        help="between streams, seconds",
    )
    parser.add_argument("--words", type=int, default=BATCH_WORDS, metavar="N", help="of each")
    parser.add_argument("--quick", action="store_true", help="8 batch requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    lines, rng = 8 if options.quick else options.lines, random.Random(1)  # noqa: S311 (as above)
    prompts = [_words(rng, options.words) for _ in range(_LINES_MAX if options.streams else lines)]
    pauses_s = tuple(options.pauses)
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)

    def measure(count: int | None, streams: Callable[[Run], bool], *, yields: bool = True) -> Run:
        with _serving(model, yields=yields) as url:
            lines = prompts[:count]
            return asyncio.run(run(url, lines, streams, pauses_s, is_endless=count is None))

    def beside_batch(found: Run) -> bool:
        return not found.took_s

    if options.streams:
        beside = measure(None, lambda found: len(found.first_s) < options.streams)
        lines = len(beside.answers)
    else:
        beside = measure(lines, beside_batch)
    alone = measure(lines, lambda _: False)
    idle = measure(0, lambda found: len(found.first_s) < len(beside.first_s))
    runs_on = measure(max(2, lines // 4), beside_batch, yields=False)
    found = _result(beside, alone, idle, runs_on)
    for figure in found.figures:
        for variant, values in figure.values.items():
            print(f"{figure.name}, {variant}: {values[0]:.3g} {figure.unit}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


def _result(beside: Run, alone: Run, idle: Run, runs_on: Run) -> Result:
    firsts = {BESIDE: beside.first_s, RUNS_ON: runs_on.first_s, ALONE: idle.first_s}
    late = {name: [_percentile(times, 0.99)] for name, times in firsts.items()}
    median = {name: [statistics.median(times)] for name, times in firsts.items()}
    ideal = alone.speed * (1 - sum(idle.stream_s) / beside.took_s)
    speeds = {BESIDE: [beside.speed], IDEAL: [ideal], ALONE: [alone.speed]}
    equal = sum(map(str.__eq__, beside.answers, alone.answers))
    later, kept = late[BESIDE][0] / late[ALONE][0], beside.speed / ideal
    lines, streams = len(alone.answers), len(beside.first_s)
    return Result(
        [
            Figure("first token of a stream, 99th percentile", "s", late, ALONE),
            Figure("first token of a stream, median", "s", median, ALONE),
            Figure("batch", "tokens/s", speeds, ALONE),
        ],
        {
            f"each of {streams} streams waits at most {FIRST_TOKEN_MAX} times: {later:.2f}": later
            <= FIRST_TOKEN_MAX,
            f"a batch has {SPEED_MIN} of its ideal speed: {kept:.2f}": kept >= SPEED_MIN,
            f"all answers are those given alone: {equal} of {lines}": equal == lines,
        },
    )


def _percentile(times: Sequence[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


if __name__ == "__main__":
    sys.exit(main())
