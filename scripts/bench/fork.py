"""Measure several answers to one prompt beside as many plain requests for it.

SmolLM2 on two instances of two slots, one thread each. The same prompt, new in each round, is sent
once with `n`, and as `n` requests at once for one answer each. Tokens are those that the engines
computed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.corral_cli import CorralCli, until

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.system.paths import directories

FORK, PLAIN = "one request with n", "n requests"
# Tokens of SmolLM2 in a word of the list and the space before it.
WORD_TOKENS: Final = 1.04
REPEATED_MAX: Final = 1.05
SETTINGS = """
[models.chat]
path = "{path}"
replicas = 2
flags = {{ parallel = 2, ctx-size = 16384, threads = 1, threads-batch = 1 }}
"""


@dataclass
class Run:
    """The rounds of one variant: time until the last answer, and tokens of all requests."""

    took_s: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    prompt: int = 0  # tokens of the last prompt


async def _ask(http: aiohttp.ClientSession, prompt: str, answers: int) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "ignore_eos": True,
        "seed": 1,
        "n": answers,
    }
    async with http.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        found: dict[str, Any] = await response.json()
        return found


async def _round(corral: CorralCli, prompt: str, requests: int, answers: int, run: Run) -> None:
    before = len(corral.events("request.finished"))
    async with session(corral.url) as http:
        began_at_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(http, prompt, answers)) for _ in range(requests)]
        run.took_s.append(time.monotonic() - began_at_s)
    until(lambda: len(corral.events("request.finished")) == before + requests)
    finished = corral.events("request.finished")[before:]
    run.computed.append(sum(event["prompt_tokens"] for event in finished))
    run.prompt = tasks[0].result()["usage"]["prompt_tokens"]


def _measure(model: Path, tokens: int, rounds: int, requests: int, answers: int) -> Run:
    run, rng = Run(), random.Random(1)  # noqa: S311 (a workload, no secret)
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.configure(SETTINGS.format(path=model))
        corral.ok("start")
        try:
            for _ in range(rounds):
                prompt = " ".join(rng.choices(WORDS, k=round(tokens / WORD_TOKENS)))
                asyncio.run(_round(corral, prompt, requests, answers, run))
        finally:
            corral.end()
    return run


def main() -> int:
    """Print the figures; return 1 if the goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="of the prompt")
    parser.add_argument("--answers", type=int, default=4, metavar="N", help="to each prompt")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each variant")
    parser.add_argument("--quick", action="store_true", help="1 round with 1 000 tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    tokens, rounds = (1000, 1) if options.quick else (options.tokens, options.rounds)
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
    runs = {
        FORK: _measure(model, tokens, rounds, 1, options.answers),
        PLAIN: _measure(model, tokens, rounds, options.answers, 1),
    }
    repeated = max(runs[FORK].computed) / runs[FORK].prompt
    found = Result(
        [
            Figure("all answers", "s", {name: run.took_s for name, run in runs.items()}, PLAIN),
            Figure(
                "prompt tokens computed",
                "",
                {name: run.computed for name, run in runs.items()},
                PLAIN,
            ),
        ],
        {
            f"a prompt is computed {REPEATED_MAX} times at most: {repeated:.2f}": repeated
            < REPEATED_MAX
        },
        notes=[f"The prompt has {runs[FORK].prompt} tokens, for {options.answers} answers."],
    )
    for figure in found.figures:
        for variant, values in figure.values.items():
            print(f"{figure.name}, {variant}: {' '.join(f'{value:.6g}' for value in values)}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
