"""Mutated profiles."""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz import toml
from fuzz.case import Case


def text(seed: int, number: int) -> bytes:
    random = Random(f"{seed}/profiles/{number}")
    full: dict[str, Any] = {
        "parallel": 2,
        "ctx-size": "auto",
        "flash-attn": "on",
        "cache-type-k": "q8_0",
        "kv-unified": False,
        "threads": "auto",
        "slot-prompt-similarity": 0.5,
        "spec-draft-n-max": 8,
        "gpu-layers": "auto",
        "load-mode": "mmap",
    }
    head = {"description": "d", "extends": random.choice(("base", "fuzzed", "low-memory", "none"))}
    flags = {key: entry for key, entry in full.items() if random.random() < 0.4}
    return toml.changed(random, {"": head, "flags": flags})


def case(seed: int, number: int) -> Case:
    random = Random(f"{seed}/profiles/{number}/case")
    commands: list[tuple[str, ...]] = [
        ("profile", "check", "fuzzed"),
        ("profile", "show", "fuzzed"),
    ]
    if random.random() < 0.3:
        commands.append(("profile", "list"))
    commands.append(("config", "check", "--config", "{home}/profiled.toml"))
    made_by = (
        random.choice(("fifo", "directory", "link", "device"))
        if random.random() < 0.01
        else "write"
    )
    return Case("config/profiles/fuzzed.toml", text(seed, number), tuple(commands), made_by)
