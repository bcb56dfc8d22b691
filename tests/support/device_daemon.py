"""A daemon whose models lie on the software device, which is listed as one of 40 MiB."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import aiohttp
from support import tiny_gguf
from support.buffers import logged_bytes
from support.corral_cli import CorralCli

MIB: Final = 1024**2
TOTAL_MIB: Final = 40
# Weights of 8 MiB and a cache of 16 MiB: of two such models one fits.
_FLAGS: Final = """
ctx-size = 8192
parallel = 1
batch-size = 32
ubatch-size = 32
cache-type-k = "f16"
cache-type-v = "f16"
spec-type = "none"
warmup = false
"""
ON_DEVICE: Final = f'{_FLAGS}gpu-layers = "all"\n'


def make_model(directory: Path) -> Path:
    """Write a model for ON_DEVICE: its weights are 8 MiB on the device, its cache is 16 MiB."""
    path = directory / "wide.gguf"
    return tiny_gguf.make(path, embd=256, heads=8, kv_heads=4, layers=4, ff=1024, ctx=8192)


def settings(engine: Path, model: Path, supervisor: str = "", **models: str) -> str:
    """Return a corral.toml of models that load with their first request."""
    head = f'engine = "{engine}"\n[supervisor]\npersist_slots = false\n{supervisor}\n'
    tables = [
        f'[models.{name}]\npath = "{model}"\npreload = false\nmin_residency_s = 0\n{rest}'
        for name, rest in models.items()
    ]
    return head + "\n".join(tables)


async def _answer(url: str, model: str, text: str) -> tuple[int, str]:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        return response.status, await response.text()


def ask(corral: CorralCli, model: str, text: str = "hello") -> tuple[int, str]:
    return asyncio.run(_answer(corral.url, model, text))


def logged_mib(corral: CorralCli, instance: str) -> float:
    """Return the allocations on the device that the engine of the latest run logged."""
    log = (corral.root / "log" / f"{instance}.log").read_text("utf-8")
    lines = log.rpartition("[llama-corral: run")[2].splitlines()
    return sum(logged_bytes(lines, "Vulkan0").values()) / MIB


def planned_mib(corral: CorralCli, model: str) -> float:
    at_start: float = corral.data("plan", model)["memory"]["devices"]["Vulkan0"]["at_start"]
    return at_start / MIB


def write_profile(corral: CorralCli, more: str = "") -> None:
    """Write ON_DEVICE as a profile, whose values are not those of the model's own table."""
    profile = corral.root / "config" / "profiles" / "device.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text(f'description = "for a device"\n[flags]\n{ON_DEVICE}{more}', "utf-8")
