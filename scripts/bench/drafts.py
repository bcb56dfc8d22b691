"""See `drafts`, the script of this name."""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import gguf

from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.plain_engine import plain
from scripts.bench.result import Figure, Result, one_round
from supervisor.models import pinned
from supervisor.plan.draft_speed import DraftSpeed, count, decide
from supervisor.system.paths import directories

NONE: Final = "none"
# As plans have them.
DRAFTING: Final = (
    "--poll",
    "0",
    "--spec-draft-n-max",
    "8",
    "--spec-draft-n-min",
    "1",
    "--spec-draft-p-min",
    "0.5",
)
WAYS: Final[Mapping[str, Sequence[str]]] = {
    NONE: (),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "draft-simple": ("--spec-type", "draft-simple", *DRAFTING),
}
CLIENTS: Final = (1, 2, 4)
WORKLOADS: Final = ("chat", "code", "extraction", "json")
TOKENS: Final = 128
# The tokens over which the rule is played.
PLAYED_TOKENS: Final = 200_000
ORDERS: Final = 9
# Goals: against none, and against the better of drafting always and never.
WITHOUT: Final = 0.98
BEST: Final = 0.9
DRAFT_LAYERS: Final = 8


@dataclass(frozen=True)
class Answer:
    tokens: int
    seconds: float  # of decoding


def cut(source: Path, target: Path, layers: int) -> Path:
    """Write a model with the first layers of another one."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = layers if field.name.endswith(".block_count") else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        place = tensor.name.split(".")
        if place[0] != "blk" or int(place[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def body(workload: str, rng: random.Random) -> Mapping[str, Any]:
    """Return a chat request of a workload."""
    words = rng.choices(WORDS, k=160)
    people = [f"{rng.choice(WORDS)} {rng.choice(WORDS)}, {rng.randrange(90)}" for _ in range(8)]
    more: dict[str, Any] = {"temperature": 0}
    match workload:
        case "chat":
            text, more = f"Tell me a story of {' '.join(words[:6])}.", {"temperature": 0.8}
        case "code":
            lines = "\n".join(
                f"def {first}_{second}(value: int) -> int:\n    return value + {len(first)}\n"
                for first, second in zip(words[:20:2], words[1:20:2], strict=True)
            )
            text = f"Repeat this file, but rename `value` to `number`.\n```python\n{lines}```"
        case "extraction":
            text = f"Repeat word by word: {' '.join(words)}"
        case _:
            name = {"type": "string", "maxLength": 30}
            age = {"type": "integer", "minimum": 0, "maximum": 99}
            properties = {"name": name, "age": age}
            item = {"type": "object", "properties": properties, "required": [*properties]}
            text = f"List these people with name and age as JSON: {'; '.join(people)}"
            schema = {"type": "array", "items": item, "minItems": 8, "maxItems": 8}
            more["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
    messages = [{"role": "user", "content": text}]
    common = {"max_tokens": TOKENS, "seed": rng.randrange(10**6), "cache_prompt": False}
    return {"messages": messages, **common, **more}


async def measure(url: str, workload: str, clients: int, answers: int, seed: int) -> list[Answer]:
    """Have each client ask for so many answers one after another; return them."""
    found: list[Answer] = []

    async def client(http: aiohttp.ClientSession, number: int) -> None:
        rng = random.Random(f"{seed} {number}")  # noqa: S311 (a workload, no secret)
        for _ in range(answers):
            async with http.post("/v1/chat/completions", json=body(workload, rng)) as response:
                content = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {content}")
            timings = content["timings"]
            if (tokens := timings["predicted_n"] - 1) > 0:
                found.append(Answer(tokens, timings["predicted_ms"] / 1000))

    async with session(url) as http, asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(http, number))
    return found


def rate(answers: Iterable[Answer]) -> float:
    listed = [*answers]
    return sum(each.tokens for each in listed) / sum(each.seconds for each in listed)


def played(with_drafts: Sequence[Answer], without: Sequence[Answer], clients: int) -> float:
    """Return the tokens per second of the rule over such requests, trials included.

    The median of several orders, since the rule sees only the requests that come.
    """
    orders = (random.Random(number) for number in range(ORDERS))  # noqa: S311 (no secret)
    return statistics.median(_play(with_drafts, without, clients, rng) for rng in orders)


def _play(
    with_drafts: Sequence[Answer], without: Sequence[Answer], clients: int, rng: random.Random
) -> float:
    speed, drafts, tokens, seconds = DraftSpeed("ngram-mod"), True, 0, 0.0
    while tokens < PLAYED_TOKENS:
        answer = rng.choice(with_drafts if drafts else without)
        tokens, seconds = tokens + answer.tokens, seconds + answer.seconds
        speed = count(
            speed, drafts=drafts, busy=clients, tokens=answer.tokens, seconds=answer.seconds
        )
        speed, drafts = decide(speed, drafts=drafts)
    return tokens / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--clients", type=int, action="append", help="at the same time")
    parser.add_argument("--answers", type=int, default=8, help="of all clients, in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    model = pinned.find_pin("smollm2").path(directories().models)
    common = ["--parallel", "4", "--no-kv-unified", "--ctx-size", "8192", "--batch-size", "512"]
    common += ["--threads", options.threads, "--cache-ram", "0"]
    with tempfile.TemporaryDirectory(prefix="corral-") as home, ExitStack() as stack:
        draft = cut(model, Path(home) / "draft.gguf", DRAFT_LAYERS)
        words = {**WAYS, "draft-simple": (*WAYS["draft-simple"], "--spec-draft-model", str(draft))}
        urls = {
            way: stack.enter_context(plain("--model", model, *common, *more))
            for way, more in words.items()
        }
        found = [
            compare(urls, workload, clients, max(1, options.answers // clients), options.rounds)
            for workload in options.workload or WORKLOADS
            for clients in options.clients or CLIENTS
        ]
    result = Result(
        [figure for figure, _ in found],
        {goal: is_met for _, goals in found for goal, is_met in goals.items()},
    )
    result.write(options.json)
    for goal in result.missed:
        print(f"missed: {goal}")
    return bool(result.missed)


def compare(
    urls: Mapping[str, str], workload: str, clients: int, answers: int, rounds: int
) -> tuple[Figure, Mapping[str, bool]]:
    """Measure each way in turn, play the rule over two ways each, and print the rates."""
    found: dict[str, list[Answer]] = {way: [] for way in urls}
    for number in range(rounds):
        for way, url in urls.items():
            found[way] += asyncio.run(measure(url, workload, clients, answers, number))
    rates = {way: rate(found[way]) for way in urls}
    shown, goals = [f"{NONE} {rates[NONE]:.0f} tokens/s"], {}
    for way in (way for way in urls if way != NONE):
        followed = played(found[way], found[NONE], clients)
        rates[f"{way}, decided"] = followed
        best, always = max(rates[way], rates[NONE]), rates[way] / rates[NONE]
        ratio, of_best = followed / rates[NONE], followed / best
        name = f"{workload}, {clients} clients, {way}"
        goals[f"{name}: {ratio:.3f} × none, at least {WITHOUT}"] = ratio >= WITHOUT
        goals[f"{name}: {of_best:.3f} × the best, at least {BEST}"] = of_best >= BEST
        shown.append(f"{way} {always:.2f}, decided {ratio:.2f} ({of_best:.2f} of the best)")
    print(f"{workload:10} {clients} clients: {'; '.join(shown)}", flush=True)
    return one_round(f"{workload}, {clients} clients", "tokens/s", rates, NONE), goals


if __name__ == "__main__":
    sys.exit(main())
