"""Compare routing by speed with equal weights, over two simulated engines of unequal speed.

The router is the real one. The engines only count, in virtual time, so neither the machine nor its
load changes a figure. Each computes one prompt after the other, and a pass takes longer by a share
for each further sequence in it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.settings import ProxySettings
from proxy.upstream.upstream import Timings

PREFILL_TPS: Final = 400.0
DECODE_TPS: Final = 100.0
SYSTEM_TOKENS: Final = 300
ANSWER_TOKENS: Final = 60
CONVERSATIONS: Final = 24
TURNS: Final = 5
SLOTS: Final = 4


@dataclass
class Engine:
    """One engine; `held` are the cached tokens of each conversation and system prompt."""

    slowdown: float
    pass_share: float
    decoding: int = 0
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    prefill: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def answer(self, number: int, tokens: int) -> Timings:
        clock = asyncio.get_running_loop().time
        cached = max(self.held.get(("own", number), 0), self.held.get(("system", number % 2), 0))
        new_tokens = max(1, tokens - cached)
        async with self.prefill:
            await asyncio.sleep(new_tokens * self.slowdown / PREFILL_TPS)
        self.decoding += 1
        began_at_s = clock()
        for _ in range(ANSWER_TOKENS):
            passed = 1 + self.pass_share * (self.decoding - 1)
            await asyncio.sleep(passed * self.slowdown / DECODE_TPS)
        self.decoding -= 1
        self.held["own", number] = tokens + ANSWER_TOKENS
        self.held["system", number % 2] = SYSTEM_TOKENS
        decode_ms = 1000 * (clock() - began_at_s)
        prompt_ms = 1000 * new_tokens * self.slowdown / PREFILL_TPS
        return Timings(cached, new_tokens, prompt_ms, ANSWER_TOKENS, decode_ms)


@dataclass
class Run:
    """One run of all conversations.

    Attributes:
        first_token_s: Of each answer.
        wall_s: From the first question to the last answer.
    """

    router: Router
    engines: dict[str, Engine]
    rng: random.Random
    todo: list[tuple[int, list[str]]]
    first_token_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    async def client(self) -> None:
        while self.todo:
            number, texts = self.todo.pop(self.rng.randrange(len(self.todo)))
            reply = f"answer {number} {len(texts)} " * 8
            request = ask(*texts, client=f"{number}")
            clock = asyncio.get_running_loop().time
            began_at_s = clock()
            async with self.router.lease(request) as lease:
                timings = await self._answer(lease, number)
                self.first_token_s.append(clock() - began_at_s - timings.decode_ms / 1000)
                message = {"role": "assistant", "content": reply}
                self.router.finish(lease, Completion(timings, message))
            if len(texts) < 2 * TURNS - 1:
                self.todo.append((number, [*texts, reply, "next " * 40]))

    async def _answer(self, lease: Lease, number: int) -> Timings:
        prompt = lease.request.prompt
        return await self.engines[lease.upstream.name].answer(
            number, prompt.tokens if prompt else 0
        )


def measured(seed: int, slowdown: float, pass_share: float, clients: int, *, by_speed: bool) -> Run:
    rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
    systems = ["".join(rng.choices("abcdefgh ", k=4 * SYSTEM_TOKENS)) for _ in range(2)]
    first = [f"{systems[number % 2]} {number} {'word ' * 40}" for number in range(CONVERSATIONS)]
    found: list[Run] = []

    async def main() -> None:
        clock = asyncio.get_running_loop().time
        router = Router(ProxySettings(route_by_speed=by_speed), clock=clock)
        engines = {"slow": Engine(slowdown, pass_share), "fast": Engine(1.0, pass_share)}
        for name in engines:
            router.admit(upstream(name, slots=SLOTS))
        run = Run(router, engines, rng, [(number, [text]) for number, text in enumerate(first)])
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(run.client())
        run.wall_s = clock()
        found.append(run)

    run_in_virtual_time(main())
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)
    print("equal weights as multiples of by speed: median (range)\n")
    print("slowdown  pass  clients  all of it            first token          its 95th percentile")
    for slowdown in (1.0, 1.5, 4.0, 10.0):
        for pass_share in (0.1, 0.5):
            for clients in (2, 6):
                pairs = [
                    [
                        measured(seed, slowdown, pass_share, clients, by_speed=by_speed)
                        for by_speed in (False, True)
                    ]
                    for seed in seeds
                ]
                figures = (_ratios(pairs, case) for case in (_wall_s, _first_s, _p95_s))
                shown = "  ".join(f"{figure:19}" for figure in figures)
                print(f"{slowdown:8g}  {pass_share:4g}  {clients:7}  {shown}".rstrip())
    return 0


def _ratios(pairs: Sequence[Sequence[Run]], figure: Callable[[Run], float]) -> str:
    ratios = [figure(equal) / figure(by_speed) for equal, by_speed in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _wall_s(run: Run) -> float:
    return run.wall_s


def _first_s(run: Run) -> float:
    return statistics.mean(run.first_token_s)


def _p95_s(run: Run) -> float:
    return statistics.quantiles(run.first_token_s, n=20)[-1]


if __name__ == "__main__":
    sys.exit(main())
