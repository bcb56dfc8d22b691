"""Mutated settings files, for the commands that read settings."""

from __future__ import annotations

from random import Random
from typing import Any, Final

from fuzz import toml
from fuzz.case import Case
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from proxy.nodes.settings import NodeSettings
from proxy.settings import JobSettings, ProxySettings
from supervisor.settings.schema import ModelSettings, SupervisorSettings
from supervisor.settings.tables import RestartPolicy

_FLAGS: Final = (
    *(
        "parallel",
        "ctx-size",
        "threads",
        "threads-batch",
        "batch-size",
        "ubatch-size",
        "gpu-layers",
    ),
    *("cache-type-k", "cache-type-v", "cache-ram", "flash-attn", "load-mode", "kv-unified", "fit"),
    *(
        "n-predict",
        "spec-draft-n-max",
        "rope-scaling",
        "split-mode",
        "tensor-split",
        "device",
        "pooling",
    ),
    *(
        "host",
        "port",
        "model",
        "api-key",
        "help",
        "version",
        "rpc",
        "log-file",
        "nonsense",
        "c",
        "",
    ),
)


def tables(random: Random) -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = {
        "": {},
        "proxy": {"listen": "127.0.0.1:0", **_some(random, ProxySettings)},
        "supervisor": _some(random, SupervisorSettings),
        "supervisor.restart": _some(random, RestartPolicy),
        "models.m": {**_some(random, ModelSettings), "path": "tiny.gguf"},
        "models.m.flags": dict.fromkeys(random.sample(_FLAGS, 2), 2),
        "models.m.variants.high": {"temperature": 1.0, "set": {"seed": 7}, "strip": ["stop"]},
        "models.m.restart": _some(random, RestartPolicy),
        "jobs": _some(random, JobSettings),
        "nodes.gpu": {"url": "http://127.0.0.1:9", **_some(random, NodeSettings)},
    }
    if random.random() < 0.3:
        made["models.m"]["draft"] = random.choice(("auto", "tiny.gguf"))
    return {
        name: entry
        for name, entry in made.items()
        if name in {"", "models.m"} or random.random() < 0.6
    }


def _some(random: Random, table: type[BaseModel]) -> dict[str, Any]:
    """Return some keys of a table with their defaults, or a number without one."""
    found = {}
    for name, field in table.model_fields.items():
        default = field.default
        if random.random() < 0.25 and not isinstance(default, BaseModel | dict):
            found[name] = 1 if default is None or default is PydanticUndefined else default
    return {
        name: entry for name, entry in found.items() if isinstance(entry, str | int | float | tuple)
    }


def text(seed: int, number: int) -> bytes:
    random = Random(f"{seed}/settings/{number}")
    return toml.changed(random, tables(random))


def case(seed: int, number: int) -> Case:
    random = Random(f"{seed}/settings/{number}/case")
    path = f"s{number}.toml"
    named = ("--config", f"{{home}}/{path}")
    more = random.choice(
        (("config", "show"), ("config", "show", "--json"), ("plan", "m"), ("key", "list"))
    )
    made_by = (
        random.choice(("fifo", "directory", "link", "device"))
        if random.random() < 0.01
        else "write"
    )
    return Case(path, text(seed, number), (("config", "check", *named), (*more, *named)), made_by)
