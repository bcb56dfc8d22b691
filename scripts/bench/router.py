"""Compare the change of models with that of llama-server's router mode, interleaved in one run.

Both serve three models on room for two: this project by memory, the router by `--models-max 2`. In
each round, several clients send mixed requests for all three; then a conversation of SmolLM2 is
continued after the two other models took its place.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import aiohttp
from support import tiny_gguf

from scripts.bench.conversations import WORDS, TurnResult, chat
from scripts.bench.memory_budget import CTX, CTX_TINY, SLOTS, serving
from scripts.bench.mixed_requests import Answer, ModelRequest, make_requests, send_all, session
from scripts.bench.overhead_report import spread
from scripts.bench.plain_engine import plain
from scripts.bench.result import Figure, Result
from supervisor.builds.discover import load
from supervisor.models import pinned
from supervisor.system.paths import directories

CORRAL, ROUTER = "corral", "router mode"
CHAT, OTHERS = "smollm2", ("tiny", "other")
PRESET: Final = """
[{name}]
model = {path}
ctx-size = {ctx}
"""
TOKENS: Final = 8

Values = Mapping[tuple[str, str], float]


def main() -> int:
    """Measure, print, and return 1 if a request of ours failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--words", type=int, default=700, help="of the conversation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        variants = _variants(Path(directory))
        rounds: list[Mapping[str, Values]] = []
        for number in range(options.repeats):
            order = random.Random(number).sample([*variants], len(variants))  # noqa: S311 (an order)
            rounds.append({name: measured(variants[name](), number, options) for name in order})
            result(rounds).write(options.json)  # in case the next round is cut short
            print(f"round {number + 1} of {options.repeats}", file=sys.stderr)
    found = result(rounds)
    for figure in found.figures:
        shown = {name: spread(values) for name, values in figure.values.items()}
        print(f"{figure.name}: {shown} {figure.unit}".rstrip())
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _variants(directory: Path) -> dict[str, Callable[[], AbstractContextManager[str]]]:
    """Return the servers; router mode only if the build has it."""
    tiny = tiny_gguf.make(directory / "tiny.gguf", ctx=CTX_TINY)
    smollm2 = pinned.find_pin("smollm2").path(directories().models)
    paths = {CHAT: smollm2, **dict.fromkeys(OTHERS, tiny)}
    variants: dict[str, Callable[[], AbstractContextManager[str]]] = {CORRAL: partial(ours, paths)}
    if load(None, cache_dir=directories().cache).flags.find("models-preset"):
        preset = directory / "models.ini"
        preset.write_text("".join(map(_section, paths, paths.values())))
        limits = ("--models-max", "2", "--parallel", str(SLOTS), "--cache-ram", "8")
        variants[ROUTER] = partial(plain, "--models-preset", preset, *limits)
    return variants


def _section(name: str, path: Path) -> str:
    return PRESET.format(name=name, path=path, ctx=CTX if name == CHAT else CTX_TINY)


@contextmanager
def ours(paths: Mapping[str, Path]) -> Iterator[str]:
    with serving(paths, models_max=2, residency_s=0) as corral:
        yield corral.url


def measured(
    serving_url: AbstractContextManager[str], seed: int, options: argparse.Namespace
) -> Values:
    names = [CHAT, *OTHERS]
    lists = make_requests(names, seed, clients=options.clients, count=options.requests)
    with serving_url as url:
        clock = asyncio.run(_mixed(url, lists))
        return {**clock, **asyncio.run(_return(url, seed, options.words))}


async def _mixed(url: str, lists: Sequence[Sequence[ModelRequest]]) -> Values:
    loop = asyncio.get_running_loop()
    began_at_s = loop.time()
    answers: list[Answer] = [*chain.from_iterable(await send_all(url, lists))]
    took_s = loop.time() - began_at_s
    for problem in {answer.problem[:160] for answer in answers if answer.problem}:
        print(f"problem: {problem}", file=sys.stderr)
    durations_s = [answer.duration_s for answer in answers]
    return {
        ("mixed requests: all of them", "s"): took_s,
        ("mixed requests: answer, median", "s"): statistics.median(durations_s),
        ("mixed requests: longest answer", "s"): max(durations_s),
        ("mixed requests: failed or cut", ""): sum(bool(answer.problem) for answer in answers),
    }


async def _return(url: str, seed: int, words: int) -> Values:
    """Continue a conversation after the other models took its place."""
    rng = random.Random(seed)  # noqa: S311 (a prompt)
    messages = [_message("user", " ".join(rng.choices(WORDS, k=words)))]
    async with session(url) as http:
        first, text = await _ask(http, CHAT, messages)
        for other in OTHERS:
            await _ask(http, other, [_message("user", "Hello.")])
        messages += [_message("assistant", text), _message("user", "And then?")]
        back, _ = await _ask(http, CHAT, messages)
    held = first.cached + first.prefilled
    return {
        ("return: history found in the cache", "%"): 100 * min(1.0, back.cached / held),
        ("return: first token with the load", "s"): back.first_token_s,
    }


async def _ask(
    http: aiohttp.ClientSession, model: str, messages: Sequence[Mapping[str, str]]
) -> tuple[TurnResult, str]:
    body = {"model": model, "messages": messages, "stream": True, "max_tokens": TOKENS}
    return await chat(http, {**body, "temperature": 0})


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def result(rounds: Sequence[Mapping[str, Values]]) -> Result:
    names = [name for name in (ROUTER, CORRAL) if name in rounds[0]]
    failed = sum(values[CORRAL]["mixed requests: failed or cut", ""] for values in rounds)
    missing = {} if ROUTER in names else {ROUTER: "this build has no --models-preset"}
    return Result(
        [
            Figure(
                title,
                unit,
                {name: [values[name][title, unit] for values in rounds] for name in names},
                base=ROUTER if unit == "s" and ROUTER in names else "",
            )
            for title, unit in rounds[0][CORRAL]
        ],
        {f"no request of ours fails or is cut ({failed:.0f})": failed == 0},
        missing,
        ["Three models on room for two: by memory here, by --models-max 2 in router mode."],
    )


if __name__ == "__main__":
    sys.exit(main())
