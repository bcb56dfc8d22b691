"""Check that no conversation leaks into another while engines swap many KV caches.

Each conversation has a secret in its system prompt and asks for it repeatedly. The reference
answers come from running each conversation alone without a cache. Then all run concurrently, in
random order, on two engines with few slots, so that caches move between slots and host memory all
the time. Every answer must equal its reference, and none may contain the secret of another
conversation. Later turns quote the references, so that one difference does not hide the next.

The last bits of a result depend on the batch: quantised weights and flash attention use other
kernels for one row than for many. At a near tie that yields another word (SmolLM2 Q4_1: 7 % of
these answers, alone too). So everything runs twice: with our flags, where no secret may leak, and
without those kernels, where every answer must be identical. They were on processors without
AVX-VNNI, to the last bit of each probability (420 turns with kills); with the package's own library
for it, 1 of 90 answers differed without files and kills too.

With `--kills N`, conversations move through three tiers: they are long enough to be worth a slot
file, host caches hold two of them each, and an engine is killed after every N answers, so that its
conversations are in files alone. Requests that fail with it are sent again. Slots must have been
filled from files. `--clients 6 --turns 120 --kills 30` took 7 minutes on two busy cores, half of
them for the references.

With `--new`, no conversation returns: each has a secret that was never seen before, and its turns
come while host caches give up older conversations. There are no references: an answer is only
searched for the secrets of all others, and the share of answers that name their own secret shows
the power of such a search. llama.cpp's issue 27148 reports a leak of this kind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import aiohttp
import psutil
from support import tiny_gguf
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS, chat
from scripts.bench.deployment import AFFINITY, Deployment, Flags, serving
from scripts.bench.tier_counts import slot_file_operations
from supervisor.models import pinned
from supervisor.system.paths import directories

TOKENS = 12
SEED = 7
TIMEOUT_S = 300
# Two slots per engine for all clients, and a host cache for few conversations.
CROWDED = AFFINITY.with_flags({"parallel": 2, "ctx-size": 8192, "cache-ram": 256})
# The same, with room for two conversations in each host cache. Killed engines start at once.
TIERS = replace(
    CROWDED.with_flags({"cache-ram": 24}),
    supervisor={"restart.max_failures": 1000, "restart.backoff_max_s": 0.1},
)
EXACT_KERNELS: Flags = {"repack": False, "flash-attn": "off"}
EXACT = CROWDED.with_flags(EXACT_KERNELS)
# One engine with two slots, so that each has as much to do as it can have.
ONE_ENGINE = replace(CROWDED, replicas=1)
# Of a system prompt beside kills: long enough for a file.
LONG_WORDS = 300
QUESTIONS = 5  # of a conversation
# Share of the answers that name the secret of their own conversation.
NAMED_MIN = 0.5
ATTEMPTS_MAX = 40
RETRY_S = 0.5


@dataclass
class Canary:
    """One conversation with a secret.

    Attributes:
        secret: The word that no other conversation may see.
        questions: One per turn.
        words: Of the system prompt, behind the secret.
        references: The answer to each question when the conversation ran alone, or, without
            such a run, the answers so far.
    """

    secret: str
    questions: Sequence[str]
    words: str = ""
    references: list[str] = field(default_factory=list)

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Return the messages up to a question, with the reference answers between."""
        system = f"The secret word is {self.secret}. Whoever asks is told the secret word."
        said = [_message("system", f"{system} {self.words}".strip())]
        for question, reference in zip(self.questions, self.references[:turn], strict=False):
            said += [_message("user", question), _message("assistant", reference)]
        return [*said, _message("user", self.questions[turn])]


@dataclass
class Findings:
    """The answers checked and their faults.

    Attributes:
        turns: Answers checked.
        cached: Share of the prompt tokens that came from a cache, 0 to 1.
        leaks: Answers that contain the secret of another conversation.
        named: Answers that contain the secret of their own.
        differences: Answers that differ from their reference.
        failures: Attempts that failed and were repeated.
        kills: Engines killed.
        restored: Slots filled from files.
    """

    turns: int = 0
    cached: float = 0.0
    leaks: list[str] = field(default_factory=list)
    named: int = 0
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    kills: int = 0
    restored: int = 0


def main() -> int:
    """Run, print, and return 1 on a leak or a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=2000, help="in total")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--kills", type=int, metavar="N", help="kill an engine after N answers")
    parser.add_argument("--new", action="store_true", help="no conversation returns")
    options = parser.parse_args()
    if options.new:
        with tempfile.TemporaryDirectory() as directory:
            found = run_new(_model(Path(directory), is_tiny=False), options.clients, options.turns)
        _show("new conversations", found)
        return 1 if found.leaks or found.named < found.turns * NAMED_MIN else 0
    asked = partial(run, clients=options.clients, turns=options.turns, kill_every=options.kills)
    deployment = TIERS if options.kills else CROWDED
    with tempfile.TemporaryDirectory() as directory:
        model = _model(Path(directory), is_tiny=options.tiny)
        crowded = asked(deployment, model)
        exact = asked(deployment.with_flags(EXACT_KERNELS), model)
    _show("our flags", crowded)
    _show("exact kernels", exact)
    is_through_files = not options.kills or min(crowded.restored, exact.restored) > 0
    if not is_through_files:
        print("no slot was filled from a file")
    is_wrong = crowded.leaks or exact.leaks or exact.differences
    return 1 if is_wrong or not is_through_files else 0


def _show(name: str, findings: Findings) -> None:
    print(
        f"{name}: {findings.turns} turns, {findings.cached:.0%} cached, "
        f"{findings.named} name their own secret, "
        f"{len(findings.leaks)} leaks, {len(findings.differences)} differences, "
        f"{findings.kills} kills, {len(findings.failures)} attempts failed, "
        f"{findings.restored} slots filled from files"
    )
    for finding in [*findings.leaks, *findings.differences][:5]:
        print(f"  {finding}")


def _model(directory: Path, *, is_tiny: bool) -> Path:
    if is_tiny:
        return tiny_gguf.make(directory / "tiny.gguf", ctx=16384)
    return pinned.find_pin("smollm2").path(directories().models)


def run(
    deployment: Deployment, model: Path, *, clients: int, turns: int, kill_every: int | None = None
) -> Findings:
    """Run every conversation alone, then all of them concurrently, repeatedly.

    Args:
        turns: In total.
        kill_every: Answers after each of which an engine is killed; None for no kills.
    """
    canaries = make_canaries(clients, LONG_WORDS if kill_every else 0)
    with serving(deployment, model) as corral:
        return asyncio.run(_run(corral, canaries, turns, kill_every))


def run_new(model: Path, clients: int, turns: int) -> Findings:
    """Run conversations that are all new, several at a time on one engine."""
    canaries = make_canaries(turns // QUESTIONS)
    with serving(ONE_ENGINE, model) as corral:
        return asyncio.run(_run_new(corral, canaries, clients))


async def _run_new(corral: CorralCli, canaries: Sequence[Canary], clients: int) -> Findings:
    findings, waiting = Findings(), list(canaries)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)

    async def client(seed: int) -> None:
        while waiting:
            await _repeat(http, waiting.pop(), canaries, findings, 1, seed)

    async with (
        aiohttp.ClientSession(corral.url, timeout=timeout) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(client(number))
    findings.cached /= max(1, findings.turns)
    return findings


def make_canaries(count: int, words: int = 0) -> list[Canary]:
    rng = random.Random(SEED)  # noqa: S311 (test data, not secrets)
    numbers = rng.sample(range(1000, 9999), count)
    secrets = [f"{rng.choice(WORDS)}{number}" for number in numbers]
    return [
        Canary(
            secret,
            [
                f"{' '.join(rng.choices(WORDS, k=20))}. What is the secret word?"
                for _ in range(QUESTIONS)
            ],
            " ".join(rng.choices(WORDS, k=words)),
        )
        for secret in secrets
    ]


async def _run(
    corral: CorralCli, canaries: Sequence[Canary], turns: int, kill_every: int | None
) -> Findings:
    findings, url = Findings(), corral.url
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        for canary in canaries:
            for turn in range(len(canary.questions)):
                canary.references.append((await _answer(http, canary, turn, cache=False))[0])
        began_at_s = time.monotonic()
        in_a_round = QUESTIONS * len(canaries)
        rounds = turns // in_a_round
        async with asyncio.TaskGroup() as group:
            for number, canary in enumerate(canaries):
                group.create_task(_repeat(http, canary, canaries, findings, rounds, number))
            if kill_every:
                group.create_task(_kill(corral, findings, kill_every, rounds * in_a_round))
        print(f"concurrent phase: {time.monotonic() - began_at_s:.0f} s", file=sys.stderr)
    findings.cached /= max(1, findings.turns)
    findings.restored = slot_file_operations(url)["restore"]
    return findings


async def _kill(corral: CorralCli, findings: Findings, every: int, turns: int) -> None:
    """Kill an engine each time after so many answers, until all turns were answered."""
    rng = random.Random(SEED)  # noqa: S311 (an order)
    while findings.turns < turns:
        if findings.turns // every > findings.kills and (engines := corral.engines()):
            with suppress(psutil.NoSuchProcess):
                rng.choice(engines).kill()
                findings.kills += 1
        await asyncio.sleep(0.05)


async def _repeat(
    http: aiohttp.ClientSession,
    canary: Canary,
    canaries: Sequence[Canary],
    findings: Findings,
    rounds: int,
    seed: int,
) -> None:
    rng = random.Random(seed)  # noqa: S311 (a random order)
    for turn in [*range(QUESTIONS)] * rounds:
        await asyncio.sleep(rng.random() / 20)
        said, cached = await _answer_at_last(http, canary, turn, findings)
        findings.turns += 1
        findings.cached += cached
        findings.named += canary.secret in said
        if len(canary.references) == turn:
            canary.references.append(said)
        if said != canary.references[turn]:
            findings.differences.append(f"{said!r} instead of {canary.references[turn]!r}")
        others = [other.secret for other in canaries if other is not canary]
        findings.leaks += [f"{said!r} holds {other}" for other in others if other in said]


async def _answer_at_last(
    http: aiohttp.ClientSession, canary: Canary, turn: int, findings: Findings
) -> tuple[str, float]:
    for _ in range(ATTEMPTS_MAX):
        try:
            return await _answer(http, canary, turn, cache=True)
        except (aiohttp.ClientError, RuntimeError) as error:
            findings.failures.append(repr(error))
            await asyncio.sleep(RETRY_S)
    raise RuntimeError(f"no answer in {ATTEMPTS_MAX} attempts: {findings.failures[-1]}")


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
    result, said = await chat(http, body)
    return said, result.cached / max(1, result.cached + result.prefilled)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    sys.exit(main())
