"""Measure offloading options on a GPU; without a GPU, check them on a software device.

On a GPU: a model of the shape of an 8B model, interleaved rounds, tokens per second of one stream
and of a prompt. On Mesa's software Vulkan device: whether each option answers as the processor
does. Its speed says nothing, so none is given.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from support import software_device, tiny_gguf
from support.corral_cli import CorralCli

from scripts.bench import device_plans, large_model
from scripts.bench.conversations import WORDS
from scripts.bench.mixed_requests import session
from scripts.bench.rates import answer
from scripts.bench.result import Figure, Result, one_round
from supervisor.builds.discover import Device, Engine, load

DEFAULT: Final = "all layers"
Flags = Mapping[str, object]
# Source: tools/server/README.md of llama.cpp, build 10434.
COMMON: Final[Flags] = {
    "gpu-layers": "all",
    "flash-attn": "on",
    "cache-type-k": "f16",
    "cache-type-v": "f16",
    "parallel": 1,
    "ctx-size": 8192,
    "batch-size": 2048,
    "ubatch-size": 512,
}
VARIANTS: Final[Mapping[str, Flags]] = {
    DEFAULT: {},
    "flash attention off": {"flash-attn": "off"},
    "q8_0 KV": {"cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    "half of the layers": {"gpu-layers": large_model.LAYERS // 2},
    "ubatch 128": {"ubatch-size": 128},
    "ubatch 2048": {"ubatch-size": 2048},
}
TOKENS, PROMPT_WORDS = 128, 3000
# The same options at a size for a device that is a program.
SMALL: Final[Flags] = {"ctx-size": 512, "batch-size": 32, "ubatch-size": 32}
CHECKED: Final[Mapping[str, Flags]] = {
    DEFAULT: {},
    "q8_0 KV": {"cache-type-k": "q8_0", "cache-type-v": "q8_0"},
    "half of the layers, flash attention off": {"gpu-layers": 2, "flash-attn": "off"},
}
CHECKED_TOKENS: Final = 30
# A large file, or shaders that a processor compiles.
START_WITHIN_S: Final = 240


def main() -> int:
    """Measure or check; return 1 if an option did not answer as it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        found = _found(Path(directory), options.repeats)
    found.write(options.json)
    for goal, is_met in found.goals.items():
        print(f"{'ok' if is_met else 'MISSED'}: {goal}")
    for figure in found.figures:
        print(figure)
    for name, reason in found.not_measured.items():
        print(f"not measured: {name}: {reason}")
    return 1 if found.missed else 0


def _found(directory: Path, repeats: int) -> Result:
    device = _device(directory / "cache")
    if device and not software_device.is_one([device]):
        return measure(device, large_model.make(directory / "large.gguf"), repeats)
    os.environ.update(software_device.SHOW)
    device = device or _device(directory / "software")
    nothing = {"GPU": "this machine has none; no GPU figure exists"}
    if device is None:
        reason = "this machine has none (Debian: mesa-vulkan-drivers)"
        return Result([], not_measured={**nothing, "software Vulkan device": reason})
    return check(device, directory, nothing)


def _device(cache: Path) -> Device | None:
    engine: Engine = load(None, cache_dir=cache)  # a separate cache: devices depend on drivers
    return engine.devices[0] if engine.devices else None


@contextmanager
def serving(model: Path, flags: Flags) -> Iterator[CorralCli]:
    rendered = "\n".join(f"{name} = {value!r}" for name, value in {**COMMON, **flags}.items())
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        corral.env["CORRAL_CACHE_DIR"] = str(model.parent / "cache of corral")
        corral.configure(f'[models.m]\npath = "{model}"\n[models.m.flags]\n{rendered}\n')
        start = corral.argv("start")
        try:
            subprocess.run(
                start, env=corral.env, check=True, stdout=sys.stderr, timeout=START_WITHIN_S
            )
            yield corral
        finally:
            corral.end()


# On a GPU.


def measure(device: Device, model: Path, repeats: int) -> Result:
    rounds: list[Mapping[str, Mapping[str, float]]] = []
    for number in range(repeats):
        order = random.Random(number).sample([*VARIANTS], len(VARIANTS))  # noqa: S311 (an order)
        rounds.append({name: _rates(model, VARIANTS[name]) for name in order})
        print(f"round {number + 1} of {repeats}", file=sys.stderr)
    return Result(
        [
            Figure(
                title,
                "tokens/s",
                {name: [values[name][title] for values in rounds] for name in VARIANTS},
                base=DEFAULT,
            )
            for title in rounds[0][DEFAULT]
        ],
        notes=[
            f"On {device.description}, {device.total_mib} MiB.",
            "A model of the shape of Llama 3.1 8B in Q4_0, with random weights.",
        ],
    )


def _rates(model: Path, flags: Flags) -> Mapping[str, float]:
    with serving(model, flags) as corral:
        return asyncio.run(_measured(corral.url))


async def _measured(url: str) -> Mapping[str, float]:
    rng = random.Random(1)  # noqa: S311 (a prompt)
    async with session(url) as http:
        await answer(http, "Hello.", 8)  # the first request of a process is slower
        alone = await answer(http, "Tell me a story.", TOKENS)
        long = await answer(http, " ".join(rng.choices(WORDS, k=PROMPT_WORDS)), 1)
    return {"one stream": alone["predicted_per_second"], "prefill": long["prompt_per_second"]}


# On the software device.


def check(device: Device, directory: Path, not_measured: Mapping[str, str]) -> Result:
    """Check the answers of a model that repeats the alphabet, and its memory on the device."""
    model = tiny_gguf.make(directory / "alphabet.gguf", mode="cycle", layers=4)
    goals: dict[str, bool] = {}
    device_mib: dict[str, float] = {}
    for name, flags in CHECKED.items():
        with serving(model, {**SMALL, **flags}) as corral:
            text = asyncio.run(_text(corral.url))
            memory = corral.data("plan", "m")["memory"]
        goals[f"{name}: the answer is right"] = is_alphabet(text)
        device_mib[name] = sum(_device_bytes(memory)) / 2**20
    goals["each option puts memory on the device"] = all(device_mib.values())
    planned = device_plans.check(directory)
    goals |= planned.goals
    return Result(
        [one_round("planned memory of the device", "MiB", device_mib), *planned.figures],
        goals,
        not_measured,
        [f"Correctness only, on {device.description}: no speed is given."],
    )


def _device_bytes(memory: Mapping[str, Any]) -> list[float]:
    return [device["at_start"] for device in memory["devices"].values()]


async def _text(url: str) -> str:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": CHECKED_TOKENS,
        "temperature": 0,
    }
    async with session(url) as http, http.post("/v1/chat/completions", json=body) as response:
        content: dict[str, Any] = await response.json()
    return str(content["choices"][0]["message"]["content"])


def is_alphabet(text: str) -> bool:
    repeated = string.ascii_lowercase * (CHECKED_TOKENS // 26 + 2)
    return len(text) == CHECKED_TOKENS and text in repeated


if __name__ == "__main__":
    sys.exit(main())
