"""Check that conversations return from slot files, and the cost of saving for running streams.

`return` (W8): conversations of 2 000 tokens are made on two engines of one thread, with eight slots
and host caches for ten of them. After a pause each returns once, in random order, and must find its
tokens in a slot, a host cache or a slot file. New conversations of the same length, asked between
them, are cold.

`gaps`: the pauses of three streams while other conversations of that engine end their turns and are
saved, with slot files and without (`persist_slots = false`), interleaved
(`scripts.bench.tiers_gaps`).

On two busy cores, `return --quick` took 6 minutes, and each pair of `gaps` 2.5. Most of it is cold
prefill, some 160 tokens per second on both engines together: 200 conversations take 40 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import aiohttp

from scripts.bench import tiers_gaps, tiers_large
from scripts.bench.conversations import WORDS, TurnResult, chat
from scripts.bench.deployment import AFFINITY, serving
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from scripts.bench.tier_counts import found_tokens, slot_file_operations
from supervisor.models import pinned
from supervisor.system.paths import directories

SHARE_MIN: Final = 0.9
RATIO_MAX: Final = 0.15
# Slots of 3 072 tokens; a conversation of 2 000 tokens has 46 MB.
DEPLOYMENT: Final = replace(
    AFFINITY.with_flags({"parallel": 4, "ctx-size": 4 * 3072, "cache-ram": 256}),
    supervisor={"slots_disk_budget": 2**34},
)
WORDS_OF_2000_TOKENS: Final = 1980
QUESTION_WORDS: Final = 10
TOKENS: Final = 8
CLIENTS: Final = 2  # one for each engine
COLD_EVERY: Final = 8  # returns for one cold conversation


@dataclass
class Conversation:
    """A conversation, and its turns so far."""

    messages: list[Mapping[str, str]]
    turns: list[TurnResult] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of the engine's tokens after the first turn that the second turn found."""
        first, second = self.turns
        return second.cached / (first.prefilled + first.cached + first.decoded - 1)


def main() -> int:
    """Measure, print, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=[], choices=[[], "return", "gaps"])
    parser.add_argument("--quick", action="store_true", help="24 conversations, and one pair")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--pause", type=float, default=30, metavar="S", help="before they return")
    parser.add_argument("--repeats", type=int, default=5, help="pairs that measure the gaps")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--large", action="store_true", help="conversations of the size of an 8B model instead"
    )
    large = parser.add_argument_group("with --large")
    large.add_argument("--sizes", type=int, nargs="+", default=tiers_large.SIZES, metavar="TOKENS")
    large.add_argument("--caches", nargs="+", default=["f16"], choices=["f16", "q8_0"])
    large.add_argument("--hybrid", action="store_true", help="a Qwen 3.5 instead of a Llama 3.1")
    large.add_argument("--disk-mib-s", type=int, metavar="N", help="limit of the disk (root)")
    large.add_argument("--disk-room-mib", type=int, metavar="N", help="size of the disk (root)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.large:
        found_large = tiers_large.measure(
            options.sizes,
            options.caches,
            options.disk_mib_s,
            options.disk_room_mib,
            is_hybrid=options.hybrid,
        )
        tiers_large.show(found_large)
        return _finish(found_large, options.json)
    model = pinned.find_pin("smollm2").path(directories().models)
    parts = options.parts or ["return", "gaps"]
    found: list[Result] = []
    if "return" in parts:
        count = 24 if options.quick else options.conversations
        found.append(measure_return(model, count, options.pause, options.seed))
    if "gaps" in parts:
        found.append(tiers_gaps.measure(model, 1 if options.quick else options.repeats))
    both = Result(
        [figure for entry in found for figure in entry.figures],
        {goal: is_met for entry in found for goal, is_met in entry.goals.items()},
        notes=[note for entry in found for note in entry.notes],
    )
    return _finish(both, options.json)


def _finish(result: Result, path: Path | None) -> int:
    result.write(path)
    for goal, is_met in result.goals.items():
        print(f"{'ok' if is_met else 'missed'}: {goal}")
    return 1 if result.missed else 0


def measure_return(model: Path, count: int, pause_s: float, seed: int) -> Result:
    """Make conversations, let them return, and judge the tokens that they found."""
    rng = random.Random(seed)  # noqa: S311 (texts)
    conversations = [_conversation(rng) for _ in range(count)]
    cold = [_conversation(rng) for _ in range(max(3, count // COLD_EVERY))]
    with serving(DEPLOYMENT, model) as corral:
        began_at_s = time.monotonic()
        asyncio.run(_make(corral.url, conversations))
        _report(f"{count} conversations made in {time.monotonic() - began_at_s:.0f} s", corral.url)
        time.sleep(pause_s)
        asyncio.run(_return(corral.url, conversations, cold, rng))
        _report("all returned", corral.url)
    return result(conversations, cold)


def _conversation(rng: random.Random) -> Conversation:
    return Conversation([_message("user", _words(rng, WORDS_OF_2000_TOKENS))])


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}


async def _make(url: str, conversations: Iterable[Conversation]) -> None:
    """Ask the first question of each."""
    left = iter(conversations)

    async def ask_each(http: aiohttp.ClientSession) -> None:
        for conversation in left:
            await _ask(http, conversation)

    async with session(url) as http, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask_each(http))


async def _return(
    url: str,
    conversations: Sequence[Conversation],
    cold: Sequence[Conversation],
    rng: random.Random,
) -> None:
    """Ask the second question of each, one after another; cold ones stand between them."""
    for conversation in conversations:
        conversation.messages.append(_message("user", _words(rng, QUESTION_WORDS)))
    order = rng.sample([*conversations, *cold], len(conversations) + len(cold))
    async with session(url) as http:
        for conversation in order:
            await _ask(http, conversation)


async def _ask(http: aiohttp.ClientSession, conversation: Conversation) -> None:
    body = {
        "model": "chat",
        "messages": conversation.messages,
        "stream": True,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    turn, text = await chat(http, body)
    conversation.turns.append(turn)
    conversation.messages.append(_message("assistant", text))


def _report(title: str, url: str) -> None:
    done, found = slot_file_operations(url), found_tokens(url)
    print(f"{title}; slot files {dict(done)}; prompt tokens {dict(found)}", file=sys.stderr)


def result(returned: Sequence[Conversation], cold: Sequence[Conversation]) -> Result:
    """Judge the second turns of conversations, beside first turns of others."""
    share = statistics.mean(conversation.share for conversation in returned)
    first_s = [conversation.turns[1].first_token_s for conversation in returned]
    cold_s = [entry.turns[0].first_token_s for entry in cold]
    ratio = statistics.mean(first_s) / statistics.mean(cold_s)
    median = statistics.median(first_s) / statistics.median(cold_s)
    return Result(
        [
            Figure("first token", "s", {"returned": first_s, "cold": cold_s}),
            Figure(
                "tokens of a conversation from the tiers",
                "%",
                {"returned": [100 * conversation.share for conversation in returned]},
            ),
        ],
        {
            f"return: {SHARE_MIN:.0%} of the tokens from the tiers ({share:.1%})": share
            >= SHARE_MIN,
            f"return: first token, mean, within {RATIO_MAX} of cold ({ratio:.3f}, medians "
            f"{median:.3f})": ratio <= RATIO_MAX,
        },
        notes=[f"SmolLM2, {len(returned)} conversations of 2 000 tokens, {len(cold)} cold ones."],
    )


if __name__ == "__main__":
    sys.exit(main())
