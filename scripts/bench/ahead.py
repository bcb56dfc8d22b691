"""Compare the first token of interactive requests with and without next turns computed ahead.

Two daemons serve the same hybrid model, one with the default `ahead_share`, one with 0. Its
template leaves out reasoning, so that a prompt is computed again from the engine's last checkpoint
before the change, which is the first token unless the prompt is longer than a micro batch. In each
round, both get the turn of a new conversation, and a short request of another client after a random
time, in which the engine is idle or computes ahead. Both get the same texts and times. The mean
first token must not be more than 1.02 times that without computing ahead; the worst ones wait for
the end of a batch.

An engine that computes all the time has its first token after milliseconds, and so a busy machine
decides the ratio. `--engine-share 0.1` lets each engine compute for a tenth of the time: it is as
slow as a large model, and needs a processor so seldom that other work delays it little.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean, median
from typing import Final

from support import tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli

from scripts.bench.conversations import WORDS, chat
from scripts.bench.mixed_requests import session
from scripts.bench.result import Figure, Result
from scripts.bench.slow_down import slowed_down

RATIO_MAX: Final = 1.02
# An engine begins after a quarter of a second; the work takes some seconds.
_LATEST_S: Final = 2.0
_SETTINGS: Final = """
[proxy]
listen = "127.0.0.1:0"
ahead_share = {share}
[models.chat]
path = "{path}"
flags = {{ grammar = '{grammar}', threads = 1, ctx-size = {ctx}, parallel = 2 }}
"""
_CTX: Final = 65_536
_SHARES: Final = {"ahead_share = 0": 0.0, "default": 0.2}


async def _first_token_s(corral: CorralCli, text: str) -> float:
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "max_tokens": 32,
        "temperature": 0,
    }
    async with session(corral.url) as http:
        result, _ = await chat(http, body)
    return result.first_token_s


async def _round(corral: CorralCli, story: str, asked: str, after_s: float) -> float:
    await _first_token_s(corral, story)
    await asyncio.sleep(after_s)
    return await _first_token_s(corral, asked)


def measure(
    daemons: Mapping[str, CorralCli], rounds: int, words: int, seed: int
) -> Mapping[str, Sequence[float]]:
    """Return the first tokens of each round, in seconds, by variant."""
    chance = random.Random(seed)  # noqa: S311 (prompts and times, no secrets)
    found: dict[str, list[float]] = {name: [] for name in daemons}
    for number in range(rounds):
        story = f"{number} " + " ".join(chance.choices(WORDS, k=words))
        asked = f"{number} " + " ".join(chance.choices(WORDS, k=20))
        after_s = chance.uniform(0, _LATEST_S)
        names = list(daemons)
        chance.shuffle(names)
        for name in names:
            found[name].append(asyncio.run(_round(daemons[name], story, asked, after_s)))
    return found


def main() -> int:
    """Print the figures; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--words", type=int, default=4000, help="of a conversation's first question"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--engine-share",
        type=float,
        metavar="SHARE",
        help="of the time an engine computes, such as 0.1",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory, ExitStack() as stack:
        path = tiny_hybrid.make(
            Path(directory, "chat.gguf"),
            mode="cycle",
            ctx=_CTX,
            chat_template=tiny_gguf.REASONING_TEMPLATE,
        )
        daemons: dict[str, CorralCli] = {}
        for name, share in _SHARES.items():
            root = Path(directory, f"{share}")
            root.mkdir()
            daemons[name] = corral = CorralCli(root)
            stack.callback(corral.end)
            corral.configure(
                _SETTINGS.format(path=path, share=share, grammar=tiny_gguf.REASONED, ctx=_CTX)
            )
            corral.ok("start")
            for engine in corral.engines() if options.engine_share else ():
                stack.enter_context(slowed_down(engine.pid, options.engine_share))
        times_s = measure(daemons, options.rounds, options.words, options.seed)
        computed = len(daemons["default"].events("next_turn.computed"))
        counts = [line for line in daemons["default"].ok("slots").splitlines() if "ahead" in line]
    for name, values in times_s.items():
        figures = mean(values), median(values), max(values)
        print(
            f"{name:16} first token: mean {figures[0]:.3f} s, median {figures[1]:.3f} s, "
            f"worst {figures[2]:.3f} s"
        )
    print(*counts, sep="\n")
    before, after = times_s.values()
    ratio = mean(after) / mean(before)
    goals = {
        f"first token within {RATIO_MAX} ({ratio:.3f})": ratio <= RATIO_MAX,
        f"next turns were computed ({computed})": computed > 0,
    }
    found = Result([Figure("first token", "s", times_s, "ahead_share = 0")], goals)
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


if __name__ == "__main__":
    sys.exit(main())
