"""See that no conversation ever shows in another, with engines that keep and swap many caches.

Each client has a secret in its system prompt and is asked for it again and again. First every
conversation is held alone, and without a cache: those answers are the truth. Then all are held at
once, in random order, on two engines with few slots, so that caches move between slots and main
memory all the time. Every answer must be the one that was given alone, and none may hold the secret
of somebody else. What was said alone is what later turns quote, so that one difference does not
hide the next.

What an engine computes depends in its last bits on what it computes at the same time: quantised
weights are multiplied by other kernels for one row than for many, and so is flash attention. At a
near tie that is another word (measured with SmolLM2 in Q4_1: 7 % of these answers, held alone too).
So the conversations are held twice: with our flags, where no secret may leak, and without those two
kernels, where every answer must be the same to the letter.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import tiny_gguf

from scripts.bench.arrangement import AFFINITY, Arrangement, serving
from scripts.bench.talks import WORDS, ask
from supervisor.host import download
from supervisor.host.paths import directories

TOKENS = 12
SEED = 7
PATIENCE_S = 300
# Two slots an engine for all clients, and room for few histories beside them.
CROWDED = AFFINITY.with_flags({"parallel": 2, "ctx-size": 8192, "cache-ram": 256})
EXACT = CROWDED.with_flags({"repack": False, "flash-attn": "off"})


@dataclass
class Canary:
    """One conversation with a secret.

    Attributes:
        secret: The word that nobody else may see.
        questions: What is asked, in order.
        truths: What was answered to each when it was held alone.
    """

    secret: str
    questions: Sequence[str]
    truths: list[str] = field(default_factory=list)

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Return what is said up to a question, with the true answers between."""
        system = f"The secret word is {self.secret}. Whoever asks is told the secret word."
        said = [{"role": "system", "content": system}]
        for question, truth in zip(self.questions, self.truths[:turn], strict=False):
            said += [_says("user", question), _says("assistant", truth)]
        return [*said, _says("user", self.questions[turn])]


@dataclass
class Findings:
    """What came of it.

    Attributes:
        turns: Answers looked at.
        cached: Share of the prompt tokens that came from a cache.
        leaks: Answers that hold somebody else's secret.
        differences: Answers that were not those given alone.
    """

    turns: int = 0
    cached: float = 0.0
    leaks: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def main() -> int:
    """Run, print, and return 1 where anything was seen that must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2000, help="in all, of all clients")
    parser.add_argument("--tiny", action="store_true", help="a random model of 270 kB instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), is_tiny=options.tiny)
        crowded = run(CROWDED, model, clients=options.clients, turns=options.turns)
        exact = run(EXACT, model, clients=options.clients, turns=options.turns)
    _show("our flags", crowded)
    _show("exact kernels", exact)
    return 1 if crowded.leaks or exact.leaks or exact.differences else 0


def _show(name: str, findings: Findings) -> None:
    print(
        f"{name}: {findings.turns} turns, {findings.cached:.0%} cached, "
        f"{len(findings.leaks)} leaks, {len(findings.differences)} differences"
    )
    for finding in [*findings.leaks, *findings.differences][:5]:
        print(f"  {finding}")


def _model(directory: Path, *, is_tiny: bool) -> Path:
    if is_tiny:
        return tiny_gguf.make(directory / "tiny.gguf", ctx=16384)
    return download.find_pin("smollm2").path(directories().models)


def run(arrangement: Arrangement, model: Path, *, clients: int, turns: int) -> Findings:
    """Hold every conversation alone, then all at once, again and again."""
    with serving(arrangement, model) as corral:
        return asyncio.run(_run(corral.url, make_canaries(clients), turns))


def make_canaries(clients: int) -> list[Canary]:
    """Return conversations with different secrets and different questions."""
    chance = random.Random(SEED)  # noqa: S311 (these secrets hide nothing)
    secrets = [f"{word}{chance.randrange(1000, 9999)}" for word in chance.sample(WORDS, clients)]
    return [
        Canary(
            secret,
            [
                f"{' '.join(chance.choices(WORDS, k=20))}. What is the secret word?"
                for _ in range(5)
            ],
        )
        for secret in secrets
    ]


async def _run(url: str, canaries: Sequence[Canary], turns: int) -> Findings:
    findings = Findings()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        for canary in canaries:
            for turn in range(len(canary.questions)):
                canary.truths.append((await _answer(http, canary, turn, cache=False))[0])
        began_at_s = time.monotonic()
        rounds = turns // sum(len(canary.questions) for canary in canaries)
        async with asyncio.TaskGroup() as group:
            for number, canary in enumerate(canaries):
                group.create_task(_hold(http, canary, canaries, findings, (rounds, number)))
        print(f"all at once: {time.monotonic() - began_at_s:.0f} s", file=sys.stderr)
    findings.cached /= max(1, findings.turns)
    return findings


async def _hold(
    http: aiohttp.ClientSession,
    canary: Canary,
    canaries: Sequence[Canary],
    findings: Findings,
    rounds_and_seed: tuple[int, int],
) -> None:
    rounds, seed = rounds_and_seed
    chance = random.Random(seed)  # noqa: S311 (an order hides nothing)
    for _ in range(rounds):
        for turn in range(len(canary.questions)):
            await asyncio.sleep(chance.random() / 20)
            said, cached = await _answer(http, canary, turn, cache=True)
            findings.turns += 1
            findings.cached += cached
            if said != canary.truths[turn]:
                findings.differences.append(f"{said!r} instead of {canary.truths[turn]!r}")
            strangers = [one.secret for one in canaries if one is not canary]
            findings.leaks += [f"{said!r} holds {one}" for one in strangers if one in said]


async def _answer(
    http: aiohttp.ClientSession, canary: Canary, turn: int, *, cache: bool
) -> tuple[str, float]:
    body: Mapping[str, object] = {
        "model": "chat",
        "messages": canary.messages(turn),
        "stream": True,
        "max_tokens": TOKENS,
        "temperature": 0,
        "cache_prompt": cache,
    }
    answered, said = await ask(http, body)
    return said, answered.cached / max(1, answered.cached + answered.prefilled)


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    sys.exit(main())
