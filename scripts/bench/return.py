"""Check that a conversation finds its KV cache after its engine was stopped and started.

SmolLM2 holds a conversation of 3 000 tokens. Its engine then stops: evicted for another model; with
the daemon; and, after `corral slots save`, by kill -9 together with the daemon. The next turn must
find the conversation in its cache (the engine's `cache_n`), and its first token must come much
sooner than cold. Cold is the same turn again, on an engine started after `corral slots forget`.
The time to load the model is shown, and excluded from both.

--sizes 1 4 8 measures instead how soon models of so many GB answer after they left memory: unloaded
here, asleep (--sleep-idle-seconds), started again, unloaded by llama-server's router mode.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import tiny_gguf
from support.corral_cli import CorralCli, until

from scripts.bench import return_sizes
from scripts.bench.conversations import WORDS, TurnResult, chat
from scripts.bench.event_log import read_event_log
from scripts.bench.memory_budget import serving
from scripts.bench.mixed_requests import session
from scripts.bench.result import Result, one_round
from supervisor.models import pinned
from supervisor.system.paths import directories

CHAT, OTHER = "chat", "other"
SHARE_MIN, RATIO_MAX = 0.95, 0.15
TOKENS = 8
SLOTS = 2


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation.

    Attributes:
        cached: Prompt tokens from the cache.
        prompt: All prompt tokens.
        load_s: Queueing time, which is the time to load the model.
        first_token_s: From the end of queueing to the first token.
    """

    cached: int
    prompt: int
    load_s: float
    first_token_s: float


class Conversation:
    """The conversation.

    Args:
        words: Length of the first question.
        seed: Determines its words.
    """

    def __init__(self, corral: CorralCli, words: int, seed: int) -> None:
        self._corral = corral
        rng = random.Random(seed)  # noqa: S311 (a prompt, no secret)
        self._messages = [_message("user", " ".join(rng.choices(WORDS, k=words)))]
        self._answer = ""

    def next_turn(self) -> Turn:
        if self._answer:
            self._messages += [_message("assistant", self._answer), _message("user", "And then?")]
        return self.repeat()

    def repeat(self) -> Turn:
        """Repeat the last question."""
        before = len(read_event_log(self._corral).queued_s(CHAT))
        result, self._answer = asyncio.run(_chat(self._corral.url, CHAT, self._messages))
        until(lambda: len(read_event_log(self._corral).queued_s(CHAT)) > before)
        queued_s = read_event_log(self._corral).queued_s(CHAT)[-1]
        prompt = result.cached + result.prefilled
        return Turn(result.cached, prompt, queued_s, result.first_token_s - queued_s)


async def _chat(
    url: str, model: str, messages: Sequence[Mapping[str, str]]
) -> tuple[TurnResult, str]:
    body = {
        "model": model,
        "messages": messages,
        "stream": True,
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    async with session(url) as http:
        return await chat(http, body)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# How an engine is stopped and started.


def swapped(corral: CorralCli) -> None:
    """Evict the model by a request for another; the next turn reloads it."""
    asyncio.run(_chat(corral.url, OTHER, [_message("user", "Hello.")]))
    (model,) = (model for model in corral.data("status")["models"] if model["name"] == CHAT)
    if model["state"] != "unloaded":
        raise RuntimeError(f"{CHAT} is {model['state']} beside {OTHER}")


def restarted(corral: CorralCli) -> None:
    """Restart the daemon."""
    corral.ok("stop")
    corral.ok("start", CHAT)


def killed(corral: CorralCli) -> None:
    """Save the slots, kill the daemon and its engines, and start again."""
    corral.ok("slots", "save")
    corral.kill()
    corral.ok("start", CHAT)


def forgotten(corral: CorralCli) -> None:
    """Restart the model without saved slots."""
    corral.ok("stop", CHAT)
    corral.ok("slots", "forget", "--all")
    corral.ok("start", CHAT)


RESTARTS: Mapping[str, Callable[[CorralCli], None]] = {
    "swapped out and in": swapped,
    "daemon restarted": restarted,
    "killed after slots save": killed,
}


def main() -> int:
    """Restart in each way, print a line for it, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smollm2", type=Path, help="GGUF; else that of corral model get")
    parser.add_argument("--words", type=int, default=2900, help="of the first question")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sizes", type=float, nargs="+", metavar="GB", help="of models; see above")
    parser.add_argument("--rounds", type=int, default=2, help="with --sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.sizes:
        return show(return_sizes.measure(options.sizes, options.words, options.rounds), options)
    smollm2 = options.smollm2 or pinned.find_pin("smollm2").path(directories().models)
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        other = tiny_gguf.make(Path(directory) / "tiny.gguf", ctx=32768)
        paths = {CHAT: smollm2, OTHER: other}
        with serving(paths, models_max=1, slots=SLOTS, residency_s=0) as corral:
            found = run(corral, Conversation(corral, options.words, options.seed))
    return show(found, options)


def show(found: Result, options: argparse.Namespace) -> int:
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def run(corral: CorralCli, conversation: Conversation) -> Result:
    """Restart in each way, and print a line for it."""
    head = ("history", "cached", "share", "load", "first token", "cold", "ratio")
    print(("{:24}" + " {:>11}" * len(head)).format("", *head))
    turns: dict[str, tuple[Turn, Turn]] = {}
    goals: dict[str, bool] = {}
    last = conversation.next_turn()
    for name, restart in RESTARTS.items():
        held = last.prompt + TOKENS
        restart(corral)
        found = conversation.next_turn()
        forgotten(corral)
        last = cold = conversation.repeat()
        turns[name] = found, cold
        share, ratio = found.cached / held, found.first_token_s / cold.first_token_s
        print(
            f"{name:24} {held:11} {found.cached:11} {share:11.1%} {found.load_s:9.2f} s "
            f"{found.first_token_s:9.2f} s {cold.first_token_s:9.2f} s {ratio:11.3f}"
        )
        goals |= {
            f"{name}: {SHARE_MIN:.0%} of the history cached ({share:.1%})": share >= SHARE_MIN,
            f"{name}: first token within {RATIO_MAX} of cold ({ratio:.3f})": ratio <= RATIO_MAX,
            f"{name}: cold is cold ({cold.cached} cached)": cold.cached == 0,
        }
    return _result(turns, goals)


def _result(turns: Mapping[str, tuple[Turn, Turn]], goals: Mapping[str, bool]) -> Result:
    """`turns` are the turn that found its conversation, and the cold one, by way of restart."""
    figures: Mapping[str, tuple[str, Callable[[Turn, Turn], float]]] = {
        "tokens of the prompt": ("", lambda found, _: found.prompt),
        "of these from the cache": ("%", lambda found, _: 100 * found.cached / found.prompt),
        "load": ("s", lambda found, _: found.load_s),
        "first token": ("s", lambda found, _: found.first_token_s),
        "first token without saved slots": ("s", lambda _, cold: cold.first_token_s),
    }
    return Result(
        [
            one_round(title, unit, {name: value(*both) for name, both in turns.items()})
            for title, (unit, value) in figures.items()
        ],
        goals,
    )


if __name__ == "__main__":
    sys.exit(main())
