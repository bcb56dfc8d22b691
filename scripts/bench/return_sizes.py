"""Measures the next first token of an unloaded model, history included, by the model's size.

The models have the shape of an 8B model with fewer or more layers, and random weights in Q4_0;
their files stay in the page cache. After the first answer of a conversation the model leaves memory
in one of four ways; the next turn brings it back. A model that stays loaded is the lower bound.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.corral_cli import CorralCli, until

from scripts.bench import large_model
from scripts.bench.conversations import WORDS, TurnResult, chat
from scripts.bench.mixed_requests import session
from scripts.bench.overhead_report import spread
from scripts.bench.plain_engine import plain
from scripts.bench.result import Figure, Result

NAME: Final = "chat"
LOADED: Final = "stays loaded"
OURS: Final = "unloaded here, slots saved"
ASLEEP: Final = "engine asleep (--sleep-idle-seconds)"
RELOADED: Final = "plain engine started again"
ROUTER: Final = "unloaded by router mode"
CACHED_MIN: Final = 0.95
_SLEEP_S: Final = 1
_TOKENS: Final = 4
_LIMIT_S: Final = 300.0
_FLAGS: Final = {"parallel": 1, "ctx-size": 4096, "batch-size": 512}
# Of one layer of `large_model`, and of its two matrices of the vocabulary.
_LAYER_GB, _ENDS_GB = 0.1225, 0.147

_Messages = list[dict[str, str]]
# Takes the first turn, brings the model out of memory, and returns the time to the next one's first
# token, with the share of the first turn's prompt that it found in the cache.
_Variant = Callable[[Path, _Messages], tuple[float, float]]


def measure(sizes_gb: Sequence[float], words: int, rounds: int) -> Result:
    """Measure each size in each way, and print a line for each."""
    figures, goals = list[Figure](), dict[str, bool]()
    for size_gb in sizes_gb:
        with tempfile.TemporaryDirectory(prefix="corral-") as directory:
            layers = max(1, round((size_gb - _ENDS_GB) / _LAYER_GB))
            model = large_model.make(Path(directory) / "model.gguf", layers=layers)
            named = f"{model.stat().st_size / 1e9:.1f} GB"
            first_s, cached = _measure_size(model, words, rounds)
        for name, values in first_s.items():
            share = f"{min(cached[name]):.0%} of the history found"
            print(f"{named:8} {name:40} {spread(values)} s, {share}", flush=True)
        figures += [
            Figure(f"{named}: next first token", "s", first_s, base=OURS),
            Figure(f"{named}: history found", "", cached),
        ]
        found = min(cached[OURS])
        goals[f"{named}: {CACHED_MIN:.0%} of the history found ({found:.0%})"] = found >= CACHED_MIN
        for other in (ASLEEP, RELOADED, ROUTER):
            ours, theirs = (sum(first_s[name]) / rounds for name in (OURS, other))
            goals[f"{named}: before: {other} ({ours:.1f} and {theirs:.1f} s)"] = ours < theirs
    return Result(figures, goals)


def _measure_size(
    model: Path, words: int, rounds: int
) -> tuple[Mapping[str, list[float]], Mapping[str, list[float]]]:
    variants: Mapping[str, _Variant] = {
        LOADED: partial(_ours, unload=False),
        OURS: partial(_ours, unload=True),
        ASLEEP: _asleep,
        RELOADED: _reloaded,
        ROUTER: _router,
    }
    first_s, cached = ({name: list[float]() for name in variants} for _ in range(2))
    for number in range(rounds):
        rng = random.Random(number)  # noqa: S311 (a prompt, and an order)
        question = " ".join(rng.choices(WORDS, k=words))
        for name in rng.sample([*variants], len(variants)):
            messages = [{"role": "user", "content": question}]
            took_s, share = variants[name](model, messages)
            first_s[name].append(took_s)
            cached[name].append(share)
            print(f"round {number + 1}: {name}: {took_s:.1f} s", file=sys.stderr, flush=True)
    return first_s, cached


def _ours(model: Path, messages: _Messages, *, unload: bool) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        flags = ", ".join(f"{name} = {value}" for name, value in _FLAGS.items())
        corral.configure(f'[models.{NAME}]\npath = "{model}"\nflags = {{ {flags} }}\n')
        try:
            corral.ok("start")
            held = _first_turn(corral.url, messages)
            if unload:
                corral.ok("unload", NAME)
                until(lambda: not corral.engines(), within_s=_LIMIT_S)
            return _turn(corral.url, messages, held)
        finally:
            corral.end()


def _asleep(model: Path, messages: _Messages) -> tuple[float, float]:
    with plain(*_words(model), "--sleep-idle-seconds", str(_SLEEP_S)) as url:
        held = _first_turn(url, messages)
        until(lambda: asyncio.run(_get(url, "/props")).get("is_sleeping"), within_s=_LIMIT_S)
        return _turn(url, messages, held)


def _reloaded(model: Path, messages: _Messages) -> tuple[float, float]:
    with plain(*_words(model)) as url:
        held = _first_turn(url, messages)
    began_s = time.monotonic()
    with plain(*_words(model)) as url:
        load_s = time.monotonic() - began_s
        took_s, share = _turn(url, messages, held)
        return load_s + took_s, share


def _router(model: Path, messages: _Messages) -> tuple[float, float]:
    with _preset(model) as preset, plain("--models-preset", preset) as url:
        held = _first_turn(url, messages)
        asyncio.run(_post(url, "/models/unload", {"model": NAME}))

        def is_unloaded() -> bool:
            (listed,) = asyncio.run(_get(url, "/models"))["data"]
            return bool(listed["status"]["value"] == "unloaded")

        until(is_unloaded, within_s=_LIMIT_S)
        return _turn(url, messages, held)


def _words(model: Path) -> list[str]:
    flags = [word for name, value in _FLAGS.items() for word in (f"--{name}", str(value))]
    return ["--model", str(model), "--alias", NAME, *flags]


@contextmanager
def _preset(model: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        preset = Path(directory) / "models.ini"
        flags = "".join(f"{name} = {value}\n" for name, value in _FLAGS.items())
        preset.write_text(f"[{NAME}]\nmodel = {model}\n{flags}", "utf-8")
        yield preset


def _first_turn(url: str, messages: _Messages) -> int:
    """Ask the question, add its answer and the next question; return the tokens of the prompt."""
    turn, answer = asyncio.run(_chat(url, messages))
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And then?"},
    ]
    return turn.cached + turn.prefilled


def _turn(url: str, messages: _Messages, held: int) -> tuple[float, float]:
    turn, _ = asyncio.run(_chat(url, messages))
    return turn.first_token_s, min(1.0, turn.cached / held)


async def _chat(url: str, messages: _Messages) -> tuple[TurnResult, str]:
    body = {"model": NAME, "messages": messages, "stream": True, "max_tokens": _TOKENS}
    async with session(url) as http:
        return await chat(http, {**body, "temperature": 0})


async def _get(url: str, path: str) -> Mapping[str, Any]:
    async with aiohttp.ClientSession(url) as http, http.get(path) as response:
        found: Mapping[str, Any] = await response.json()
        return found


async def _post(url: str, path: str, body: Mapping[str, object]) -> None:
    async with aiohttp.ClientSession(url) as http, http.post(path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {json.dumps(await response.text())}")
