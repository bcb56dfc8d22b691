"""Ways to serve one model with two engines, each started afresh for one run."""

from __future__ import annotations

import asyncio
import re
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from end_to_end.home import Corral

from scripts.bench.talks import Clients, Talk, Tally, Workload

Flags = Mapping[str, object]

# What llama-server takes where nobody says anything: -np auto, and a context of 8192.
# Source: common/common.h and tools/server/README.md of llama.cpp, build 10434.
ENGINE_DEFAULTS: Flags = {
    "parallel": 4,
    "kv-unified": True,
    "slot-prompt-similarity": 0.1,
    "ctx-size": 8192,
    "cache-ram": 8192,
    "batch-size": 2048,
    "ubatch-size": 512,
}
OURS: Flags = {"parallel": 4, "ctx-size": 16384}
ONE_THREAD: Flags = {"threads": 1, "threads-batch": 1}


@dataclass(frozen=True)
class Arrangement:
    """A way to serve.

    Attributes:
        name: As it stands in the table.
        policy: Who is asked: a policy of the proxy, or `sticky`: each conversation stays with the
            engine of its number, whatever it shares with others.
        flags: Of each engine.
    """

    name: str
    policy: str
    flags: Flags = field(hash=False)

    def with_flags(self, flags: Flags) -> Arrangement:
        """Return the same with more flags."""
        return Arrangement(self.name, self.policy, {**self.flags, **flags})


DEFAULT_LEAST_BUSY = Arrangement("least busy, engine's defaults", "least-busy", ENGINE_DEFAULTS)
LEAST_BUSY = Arrangement("least busy, our flags", "least-busy", OURS)
STICKY = Arrangement("sticky sessions, our flags", "sticky", OURS)
AFFINITY = Arrangement("affinity, our flags", "affinity", OURS)


def route(arrangement: Arrangement) -> Callable[[Talk], str]:
    """Return which model a conversation is held with; applications are conversations' parity."""
    if arrangement.policy == "sticky":
        return lambda talk: "ab"[talk.number // 2 % 2]
    return lambda _: "chat"


@contextmanager
def serving(arrangement: Arrangement, model: Path) -> Iterator[Corral]:
    """Serve for the length of the block, with nothing cached at its beginning."""
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = Corral(Path(home))
        corral.configure(_settings(arrangement, model))
        corral.ok("start")
        try:
            yield corral
        finally:
            corral.end()


def run(
    arrangement: Arrangement,
    model: Path,
    workload: Workload,
    seed: int,
    meanwhile: Callable[[Corral, int], None] = lambda *_: None,
) -> Tally:
    """Serve afresh, hold the conversations of a seed, and return what came of them.

    Args:
        arrangement: How to serve.
        model: A GGUF file that chats.
        workload: What is asked.
        seed: Decides the conversations and their order.
        meanwhile: Called after each answer with how many there were.
    """
    with serving(arrangement, model) as corral:
        clients = Clients(
            corral.url, route(arrangement), workload, seed, lambda count: meanwhile(corral, count)
        )
        tally = asyncio.run(clients.run())
        tally.decoded = _decoded(corral.url)
        return tally


def _decoded(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as page:  # noqa: S310 (our own address)
        text = page.read().decode()
    line = r'^corral_decoded_tokens_total\{instance="([^"]+)".*\} (\S+)$'
    found = re.findall(line, text, re.MULTILINE)
    return {name: float(tokens) for name, tokens in found}


def _settings(arrangement: Arrangement, model: Path) -> str:
    is_sticky = arrangement.policy == "sticky"
    policy = "least-busy" if is_sticky else arrangement.policy
    flags = {**arrangement.flags, **ONE_THREAD}
    rendered = "\n".join(f"{name} = {_toml(value)}" for name, value in flags.items())
    replicas = 1 if is_sticky else 2
    text = f'[proxy]\nlisten = "127.0.0.1:0"\npolicy = "{policy}"\n'
    for name in "ab" if is_sticky else ["chat"]:
        text += f'\n[models.{name}]\npath = "{model}"\nreplicas = {replicas}\n'
        text += f"[models.{name}.flags]\n{rendered}\n"
    return text


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
