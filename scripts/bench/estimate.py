"""Compare the estimated time to the first token with the real one.

SmolLM2 with 4 slots, and a second model of the same file. Each client asks for an estimate
(`POST /corral/v1/estimate`), sends that request as a stream at once, and notes when its first text
came. Prompts have 20 to 3 000 tokens; half of the requests go on with a conversation that was
computed before. In the last phase the second model is unloaded before each request. The first
requests, from which the daemon learns, are shown apart and do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

ERROR_MAX: Final = 0.25
TOKENS: Final = (20, 3000)
# Of a conversation: the next turn must fit into a slot.
GROWN_TOKENS: Final = 3000
# A word of `WORDS`, with the space before it.
TOKENS_PER_WORD: Final = 1.25
ANSWERS: Final = (8, 16, 32, 64)
# Clients begin within so long.
START_S: Final = 4.0
UNLOADED: Final = "unloaded before"
HEADER: Final = f"{'':16} requests  first token  median error     p90  unknown"
SETTINGS: Final = """
[models.chat]
path = "{path}"
flags = {{ parallel = 4, ctx-size = 16384 }}

[models.other]
path = "{path}"
flags = {{ parallel = 4, ctx-size = 16384 }}
"""

Message = dict[str, str]


@dataclass(frozen=True)
class Phase:
    name: str
    clients: int
    requests: int
    model: str = "chat"


LEARNING: Final = Phase("the first ones", 1, 8)
PHASES: Final = (
    Phase("1 client", 1, 40),
    Phase("2 clients", 2, 20),
    Phase("4 clients", 4, 40),
    Phase("8 clients", 8, 40),
    Phase("12 clients", 12, 40),
    Phase(UNLOADED, 2, 20, "other"),
)


@dataclass(frozen=True)
class Sample:
    """One request; `estimated_s` is None where the daemon did not know."""

    phase: str
    real_s: float
    estimated_s: float | None
    estimate: dict[str, Any]
    is_cached: bool
    tokens: int
    timings: dict[str, Any]

    @property
    def error(self) -> float:
        return math.inf if self.estimated_s is None else abs(self.estimated_s / self.real_s - 1)


@dataclass
class Client:
    """Sends requests one after another."""

    http: aiohttp.ClientSession
    rng: random.Random
    model: str
    messages: list[Message] = field(default_factory=list)

    async def send(self, phase: Phase) -> Sample:
        is_cached = bool(self.messages) and self.rng.random() < 0.5
        is_cached = is_cached and _tokens(self.messages) < GROWN_TOKENS
        if not is_cached:
            self.messages = []
        tokens = self._length(is_short=is_cached)
        self.messages.append({"role": "user", "content": self._words(tokens)})
        body = {
            "model": self.model,
            "messages": self.messages,
            "max_tokens": self.rng.choice(ANSWERS),
            "stream": True,
        }
        async with self.http.post("/corral/v1/estimate", json=body) as response:
            estimate = await response.json()
        real_s, text, timings = await self._stream(body)
        sample = Sample(
            phase.name,
            real_s,
            estimate["first_token_s"],
            estimate,
            is_cached,
            round(_tokens(self.messages)),
            timings,
        )
        self.messages.append({"role": "assistant", "content": text})
        return sample

    async def _stream(self, body: dict[str, Any]) -> tuple[float, str, dict[str, Any]]:
        """Return the time of the first text, the whole text, and the timings."""
        began_at_s, first_s, text = time.monotonic(), 0.0, ""
        timings: dict[str, Any] = {}
        async with self.http.post("/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                choices, timings = event.get("choices"), event.get("timings", timings)
                piece = choices[0]["delta"].get("content") if choices else None
                if piece and not first_s:
                    first_s = time.monotonic() - began_at_s
                text += piece or ""
        return first_s or time.monotonic() - began_at_s, text, timings

    def _length(self, *, is_short: bool) -> float:
        low, high = map(math.log, TOKENS)
        if is_short:
            high = math.log(400)
        return math.exp(self.rng.uniform(low, high))

    def _words(self, tokens: float) -> str:
        return " ".join(self.rng.choices(WORDS, k=max(4, round(tokens / TOKENS_PER_WORD))))


def _tokens(messages: Sequence[Message]) -> float:
    return sum(TOKENS_PER_WORD * len(message["content"].split()) for message in messages)


def main() -> int:
    """Print the figures; return 1 if the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write each request there")
    options = parser.parse_args()
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
    with _serving(model) as corral:
        samples = asyncio.run(_measure(corral, options.seed, 4 if options.quick else 1))
    if options.samples:
        options.samples.write_text(
            "".join(json.dumps(vars(sample)) + "\n" for sample in samples), "utf-8"
        )
    found = _result(samples)
    for name, some in _phases(samples).items():
        if name in {"cached", "new", "all"} and some:
            _print_row(name, some)
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


@contextmanager
def _serving(model: Path) -> Iterator[CorralCli]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(SETTINGS.format(path=model))
        corral.ok("start")
        try:
            yield corral
        finally:
            corral.end()


async def _measure(corral: CorralCli, seed: int, divisor: int) -> list[Sample]:
    rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
    samples: list[Sample] = []
    async with session(corral.url) as http:
        print(
            f"{'':16}{'requests':>9}{'first token':>13}{'median error':>14}{'p90':>8}{'unknown':>9}"
        )
        for phase in (LEARNING, *PHASES):
            count = phase.requests if phase is LEARNING else phase.requests // divisor
            await _run(phase, http, rng, samples, corral, count)
            _print_row(phase.name, [sample for sample in samples if sample.phase == phase.name])
    return samples


async def _run(
    phase: Phase,
    http: aiohttp.ClientSession,
    rng: random.Random,
    samples: list[Sample],
    corral: CorralCli,
    count: int,
) -> None:
    left = iter(range(count))

    async def run(client: Client, after_s: float) -> None:
        await asyncio.sleep(after_s)  # of requests that come at once, none knows of the others
        for _ in left:
            sample = await client.send(phase)
            samples.append(sample)

    if phase.name == UNLOADED:
        await _run_unloaded(phase, http, rng, samples, corral, count)
        return
    clients = [
        Client(http, random.Random(rng.random()), phase.model)  # noqa: S311 (a workload)
        for _ in range(phase.clients)
    ]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(
                run(client, rng.uniform(0, START_S) if client is not clients[0] else 0)
            )


async def _run_unloaded(
    phase: Phase,
    http: aiohttp.ClientSession,
    rng: random.Random,
    samples: list[Sample],
    corral: CorralCli,
    count: int,
) -> None:
    """Unload the model before each pair of requests that come together."""
    clients = [
        Client(http, random.Random(rng.random()), phase.model)  # noqa: S311 (a workload)
        for _ in range(phase.clients)
    ]
    await clients[0].send(phase)  # from which the daemon learns
    for _ in range(count // phase.clients):
        await asyncio.to_thread(corral.ok, "unload", phase.model)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.send(phase)) for client in clients]
        samples += [task.result() for task in tasks]


def _result(samples: Sequence[Sample]) -> Result:
    counted = [sample for sample in samples if sample.phase != LEARNING.name]
    errors = {name: [entry.error for entry in some] for name, some in _phases(samples).items()}
    middle = statistics.median(sample.error for sample in counted)
    goal = f"the median error of {len(counted)} requests is under {ERROR_MAX:.0%}: {middle:.1%}"
    return Result(
        [
            Figure(f"error, {name}", "", {"median": [statistics.median(some)]})
            for name, some in errors.items()
        ],
        {goal: middle < ERROR_MAX},
    )


def _phases(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    counted = [sample for sample in samples if sample.phase != LEARNING.name]
    return {
        LEARNING.name: [sample for sample in samples if sample.phase == LEARNING.name],
        **{
            phase.name: [sample for sample in samples if sample.phase == phase.name]
            for phase in PHASES
        },
        "cached": [sample for sample in counted if sample.is_cached],
        "new": [sample for sample in counted if not sample.is_cached],
        "all": counted,
    }


def _print_row(name: str, samples: Sequence[Sample]) -> None:
    errors = sorted(sample.error for sample in samples)
    real_s = statistics.median(sample.real_s for sample in samples)
    unknown = sum(sample.estimated_s is None for sample in samples)
    p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    middle = statistics.median(errors)
    row = f"{name:16}{len(samples):9}{real_s:11.2f} s{middle:14.1%}{p90:8.1%}{unknown:9}"
    print(row, flush=True)


if __name__ == "__main__":
    sys.exit(main())
