"""Mutated files of API keys."""

from __future__ import annotations

from random import Random
from typing import Any

from fuzz import toml
from fuzz.case import Case


def text(seed: int, number: int) -> bytes:
    random = Random(f"{seed}/keys/{number}")
    full: dict[str, Any] = {
        "max_in_flight": 2,
        "requests_per_minute": 60,
        "models": ["m", "a"],
        "priority": "batch",
    }
    tables = {}
    for name in random.sample(("a", "b@c", "laptop", "x" * 64), random.randrange(1, 4)):
        secret = random.choice(({"key": f"corral-{name}-12345"}, {"sha256": f"{len(name):064x}"}))
        some = {key: entry for key, entry in full.items() if random.random() < 0.4}
        tables[f'keys."{name}"' if "@" in name else f"keys.{name}"] = {**secret, **some}
    return toml.changed(random, tables)


def case(seed: int, number: int) -> Case:
    random = Random(f"{seed}/keys/{number}/case")
    named = ("--config", "{home}/keyed.toml")
    made_by = (
        random.choice(("fifo", "directory", "link", "device"))
        if random.random() < 0.01
        else "write"
    )
    commands: list[tuple[str, ...]] = [("config", "check", *named), ("key", "list", *named)]
    if random.random() < 0.2:
        commands.append(("key", "add", "new", *named))
    return Case("keys.toml", text(seed, number), tuple(commands), made_by)
