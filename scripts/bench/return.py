"""See that a conversation finds its cache again, however its engine went away.

A conversation of 3 000 tokens is held with SmolLM2, whose engine then goes: for another model that
needs its memory; with the daemon; and, after `corral slots save`, by kill -9 together with the
daemon. The next turn must find what was said in its cache, by the engine's own `cache_n`, and its
first token must come much sooner than cold. Cold is the same turn once more, right after it, on an
engine that was started after `corral slots forget`. What a first token waited for the model to be
loaded is told apart, and counts in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tiny_gguf
from end_to_end.home import Corral, until

from scripts.bench.budget import serving
from scripts.bench.mix import session
from scripts.bench.talks import WORDS, Answered, ask
from scripts.bench.told import told
from supervisor.host import download
from supervisor.host.paths import directories

CHAT, OTHER = "chat", "other"
SHARE_MIN, RATIO_MAX = 0.95, 0.15
TOKENS = 8
SLOTS = 2


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation.

    Attributes:
        cached: Prompt tokens that the engine had.
        prompt: Prompt tokens in all.
        load_s: How long it waited for its turn.
        first_token_s: From its turn to the first token.
    """

    cached: int
    prompt: int
    load_s: float
    first_token_s: float


class Talk:
    """The conversation, and whom it is held with.

    Args:
        corral: Serves it.
        words: Length of the first question.
        seed: Decides its words.
    """

    def __init__(self, corral: Corral, words: int, seed: int) -> None:
        self._corral = corral
        chance = random.Random(seed)  # noqa: S311 (a story hides nothing)
        self._messages = [_says("user", " ".join(chance.choices(WORDS, k=words)))]
        self._answer = ""

    def go_on(self) -> Turn:
        """Ask the next question."""
        if self._answer:
            self._messages += [_says("assistant", self._answer), _says("user", "And then?")]
        return self.again()

    def again(self) -> Turn:
        """Ask the last question once more."""
        before = len(told(self._corral).waits_s(CHAT))
        answered, self._answer = asyncio.run(_ask(self._corral.url, CHAT, self._messages))
        until(lambda: len(told(self._corral).waits_s(CHAT)) > before)
        waited_s = told(self._corral).waits_s(CHAT)[-1]
        prompt = answered.cached + answered.prefilled
        return Turn(answered.cached, prompt, waited_s, answered.first_token_s - waited_s)


async def _ask(url: str, model: str, messages: Sequence[Mapping[str, str]]) -> tuple[Answered, str]:
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    async with session(url) as http:
        return await ask(http, body)


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# The ways in which an engine goes, and comes back.


def swapped(corral: Corral) -> None:
    """Have another model called, which needs the memory; the next turn calls this one back."""
    asyncio.run(_ask(corral.url, OTHER, [_says("user", "Hello.")]))
    (model,) = (one for one in corral.data("status")["models"] if one["name"] == CHAT)
    if model["state"] != "unloaded":
        raise RuntimeError(f"{CHAT} is {model['state']} beside {OTHER}")


def restarted(corral: Corral) -> None:
    """Stop the daemon, and start another."""
    corral.ok("stop")
    corral.ok("start", CHAT)


def killed(corral: Corral) -> None:
    """Save, kill the daemon and its engines, and start another."""
    corral.ok("slots", "save")
    engines, daemon = corral.engines(), corral.daemon_pid
    os.kill(daemon, signal.SIGKILL)
    for engine in engines:
        with suppress(psutil.NoSuchProcess):  # it dies with its daemon
            engine.kill()
    until(lambda: not corral.engines())
    corral.ok("start", CHAT)


def forgotten(corral: Corral) -> None:
    """Start the model anew, with nothing kept."""
    corral.ok("stop", CHAT)
    corral.ok("slots", "forget", "--all")
    corral.ok("start", CHAT)


WAYS: Mapping[str, Callable[[Corral], None]] = {
    "swapped out and in": swapped,
    "daemon restarted": restarted,
    "killed after slots save": killed,
}


def main() -> int:
    """Go each way, print a line for it, and return 1 where a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smollm2", type=Path, help="GGUF; else that of corral model get")
    parser.add_argument("--words", type=int, default=2900, help="of the first question")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    smollm2 = options.smollm2 or download.find_pin("smollm2").path(directories().models)
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        other = tiny_gguf.make(Path(directory) / "tiny.gguf", ctx=32768)
        paths = {CHAT: smollm2, OTHER: other}
        with serving(paths, places=1, slots=SLOTS, residency_s=0) as corral:
            missed = run(corral, Talk(corral, options.words, options.seed))
    for goal in missed:
        print(f"missed: {goal}")
    return 1 if missed else 0


def run(corral: Corral, talk: Talk) -> list[str]:
    """Go each way; return the goals that were missed."""
    head = ("history", "cached", "of it", "load", "first token", "cold", "ratio")
    print(("{:24}" + " {:>11}" * len(head)).format("", *head))
    missed, last = [], talk.go_on()
    for name, go in WAYS.items():
        held = last.prompt + TOKENS
        go(corral)
        found = talk.go_on()
        forgotten(corral)
        last = cold = talk.again()
        share, ratio = found.cached / held, found.first_token_s / cold.first_token_s
        print(
            f"{name:24} {held:11} {found.cached:11} {share:11.1%} {found.load_s:9.2f} s "
            f"{found.first_token_s:9.2f} s {cold.first_token_s:9.2f} s {ratio:11.3f}"
        )
        goals = {
            f"{name}: {SHARE_MIN:.0%} of the history cached ({share:.1%})": share >= SHARE_MIN,
            f"{name}: first token within {RATIO_MAX} of cold ({ratio:.3f})": ratio <= RATIO_MAX,
            f"{name}: cold is cold ({cold.cached} cached)": cold.cached == 0,
        }
        missed += [goal for goal, is_met in goals.items() if not is_met]
    return missed


if __name__ == "__main__":
    sys.exit(main())
