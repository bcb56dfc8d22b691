"""Compare pauses of streams on an engine with and without saves of other conversations.

Three streams run without a pause on an engine of one thread and eight slots. New conversations of
600 tokens come at fixed times, so that each takes the slot of an earlier one, which is saved before
that or lost: both engines compute the same prompts. A gap is the time between two tokens of one
answer. Those that no prompt was computed in are shown too: there a save stands out.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp

from scripts.bench.conversations import WORDS, chat
from scripts.bench.deployment import AFFINITY, NO_FILES, serving
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from scripts.bench.tier_counts import slot_file_operations

GOAL: Final = 1.3
STREAMS: Final = 3
SLOTS: Final = 8
WITH: Final = replace(
    AFFINITY.with_flags({"parallel": SLOTS, "ctx-size": SLOTS * 2048, "cache-ram": 64}),
    name="slot files",
    replicas=1,
)
WITHOUT: Final = replace(WITH, name="without", supervisor=NO_FILES)
STREAM_TOKENS: Final = 1500
WORDS_OF_600_TOKENS: Final = 580
TOKENS: Final = 8
ARRIVALS: Final = 6
EVERY_S: Final = 8.0


@dataclass(frozen=True)
class Gap:
    """The time between two tokens."""

    began_at_s: float
    ended_at_s: float

    @property
    def duration_s(self) -> float:
        return self.ended_at_s - self.began_at_s


@dataclass
class Seen:
    """The results of one daemon.

    Attributes:
        prompts: From a request to its first token.
        saves: Slots saved while gaps were measured.
    """

    gaps: list[Gap] = field(default_factory=list)
    prompts: list[Gap] = field(default_factory=list)
    saves: int = 0


def measure(model: Path, repeats: int) -> Result:
    """Measure pairs, each with the same prompts and in a random order."""
    rounds: list[Mapping[str, Seen]] = []
    for number in range(repeats):
        order = random.Random(number).sample([WITH, WITHOUT], 2)  # noqa: S311 (an order)
        seen: dict[str, Seen] = {}
        for deployment in order:
            with serving(deployment, model) as corral:
                seen[deployment.name] = asyncio.run(_observe(corral.url, number))
        rounds.append(seen)
        shown = {name: (entry.saves, figures(entry)) for name, entry in seen.items()}
        print(f"pair {number + 1} of {repeats}: {shown}", file=sys.stderr)
    return result(rounds)


async def _observe(url: str, seed: int) -> Seen:
    seen, is_over = Seen(), asyncio.Event()
    rng = random.Random(seed)  # noqa: S311 (texts)
    async with session(url) as http, asyncio.TaskGroup() as group:
        for at in range(STREAMS):
            group.create_task(_stream(http, at, seen, is_over))
        await _fill(http, rng)
        before = slot_file_operations(url)["save"]
        seen.gaps.clear()
        for _ in range(ARRIVALS):
            group.create_task(_arrive(http, rng, seen))
            await asyncio.sleep(EVERY_S)
        is_over.set()
        seen.saves = slot_file_operations(url)["save"] - before
    return seen


async def _fill(http: aiohttp.ClientSession, rng: random.Random) -> None:
    """Give all slots a conversation. None returns: those that do from a slot need no file."""
    for _ in range(SLOTS - STREAMS):
        await chat(http, _chat(_words(rng, WORDS_OF_600_TOKENS)))


async def _arrive(http: aiohttp.ClientSession, rng: random.Random, seen: Seen) -> None:
    began_at_s = time.monotonic()
    answer, _ = await chat(http, _chat(_words(rng, WORDS_OF_600_TOKENS)))
    seen.prompts.append(Gap(began_at_s, began_at_s + answer.first_token_s))


def _chat(question: str) -> Mapping[str, object]:
    return {
        "model": "chat",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "max_tokens": TOKENS,
        "temperature": 0,
    }


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


async def _stream(http: aiohttp.ClientSession, at: int, seen: Seen, is_over: asyncio.Event) -> None:
    """Stream one answer after another."""
    for turn in itertools.count():
        before_s: float | None = None
        body = {
            "model": "chat",
            "prompt": f"Story {at}.{turn}",
            "max_tokens": STREAM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        async with http.post("/v1/completions", json=body) as response:
            async for line in response.content:
                if is_over.is_set():
                    return
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    if before_s is not None:
                        seen.gaps.append(Gap(before_s, now_s))
                    before_s = now_s


def figures(seen: Seen) -> Mapping[str, float]:
    """Return the figures of one daemon in milliseconds, by name."""
    all_s = sorted(gap.duration_s for gap in seen.gaps)
    between_s = sorted(gap.duration_s for gap in _between(seen.gaps, seen.prompts))
    return {
        "gap, p99": 1000 * _quantile(all_s, 0.99),
        "gap between prompts, p99": 1000 * _quantile(between_s, 0.99),
        "gap, p50": 1000 * _quantile(all_s, 0.5),
        "longest gap": 1000 * all_s[-1],
        "longest gap between prompts": 1000 * between_s[-1],
    }


def _between(gaps: Sequence[Gap], prompts: Sequence[Gap]) -> list[Gap]:
    """Return the gaps in which no prompt was waiting or computed."""
    ordered = sorted(prompts, key=lambda prompt: prompt.ended_at_s)
    ends_s = [entry.ended_at_s for entry in ordered]

    def is_free(gap: Gap) -> bool:
        later = ordered[bisect_left(ends_s, gap.began_at_s) :]
        return all(entry.began_at_s > gap.ended_at_s for entry in later)

    return [gap for gap in gaps if is_free(gap)]


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def result(rounds: Sequence[Mapping[str, Seen]]) -> Result:
    """Judge the pairs by the median of their ratios."""
    values = [{name: figures(seen) for name, seen in values.items()} for values in rounds]
    names = (WITH.name, WITHOUT.name)
    goals: dict[str, bool] = {}
    for title in ("gap, p99", "gap between prompts, p99"):
        ratios = [value[WITH.name][title] / value[WITHOUT.name][title] for value in values]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        goals[f"{title}: {spread} of that without, at most {GOAL}"] = (
            statistics.median(ratios) <= GOAL
        )
    saves = [values[WITH.name].saves for values in rounds]
    goals[f"gaps: slots were saved meanwhile ({saves})"] = min(saves) > 0
    return Result(
        [
            Figure(
                title,
                "ms",
                {name: [value[name][title] for value in values] for name in names},
                base=WITHOUT.name,
            )
            for title in values[0][WITH.name]
        ],
        goals,
        notes=["SmolLM2, three streams; a new conversation of 600 tokens every 8 s."],
    )
