"""Deployments of one model on a few engines, started afresh for each run."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.corral_cli import CorralCli

from scripts.bench import new_tokens
from scripts.bench.conversations import Clients, Conversation, Workload, WorkloadResult

Flags = Mapping[str, object]

# llama-server's own defaults: -np auto, and a context of 8192.
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
_TURN_S = 0.04
KEYS = tuple(f"corral-bench-{number}" for number in range(5))
ONE_THREAD: Flags = {"threads": 1, "threads-batch": 1}


@dataclass(frozen=True)
class Deployment:
    """How the model is served.

    Attributes:
        policy: A policy of the proxy, or `sticky`: a conversation stays with the engine of its
            number, whatever it shares with others.
        flags: Flags of each engine.
        runs: Share of the time in which the first engine runs; it is stopped for the rest.
        route_by_speed: As in `[proxy]`.
        supervisor: Settings of `[supervisor]`.
        replicas: Engines; `sticky` has two models of one each.
        share_caches: As in `[proxy]`, with five API keys; empty: without keys.
    """

    name: str
    policy: str
    flags: Flags = field(hash=False)
    runs: float = 1.0
    route_by_speed: bool = True
    supervisor: Mapping[str, object] = field(default_factory=dict, hash=False)
    replicas: int = 2
    share_caches: str = ""

    def with_flags(self, flags: Flags) -> Deployment:
        return replace(self, flags={**self.flags, **flags})


# Nothing else saves conversations, so what we are compared with does not either.
NO_FILES: Mapping[str, object] = {"persist_slots": False}
DEFAULT_LEAST_BUSY = Deployment(
    "least busy, engine's defaults", "least-busy", ENGINE_DEFAULTS, supervisor=NO_FILES
)
LEAST_BUSY = Deployment("least busy, our flags", "least-busy", OURS, supervisor=NO_FILES)
STICKY = Deployment("sticky sessions, our flags", "sticky", OURS, supervisor=NO_FILES)
AFFINITY = Deployment("affinity, our flags", "affinity", OURS)
WITHOUT_FILES = Deployment("affinity without slot files", "affinity", OURS, supervisor=NO_FILES)
BY_SPEED = Deployment("by speed", "affinity", OURS, runs=0.25)
ALL_KEYS = replace(AFFINITY, name="five keys share caches", share_caches="all")
EACH_KEY = replace(AFFINITY, name="five keys share none", share_caches="key")
EQUAL = replace(BY_SPEED, name="equal weights", route_by_speed=False)


def route(deployment: Deployment) -> Callable[[Conversation], str]:
    """Return the function from a conversation to its model; parity is the application."""
    if deployment.policy == "sticky":
        return lambda conversation: "ab"[conversation.number // 2 % 2]
    return lambda _: "chat"


@contextmanager
def serving(deployment: Deployment, model: Path) -> Iterator[CorralCli]:
    """Serve for the length of the block, starting with empty caches."""
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        keys = Path(home, "keys.toml")
        keys.touch(0o600)
        keys.write_text("".join(f'[keys.{key}]\nkey = "{key}"\n' for key in KEYS), "utf-8")
        corral.configure(_settings(deployment, model, keys))
        corral.ok("start")
        try:
            yield corral
        finally:
            corral.end()


def run(
    deployment: Deployment,
    model: Path,
    workload: Workload,
    seed: int,
    meanwhile: Callable[[CorralCli, int], None] = lambda *_: None,
) -> WorkloadResult:
    """Start the deployment, run the conversations of a seed, and return the result.

    Args:
        model: GGUF file of a chat model.
        seed: Determines the conversations and their order.
        meanwhile: Called after each answer with the number of answers so far.
    """
    with serving(deployment, model) as corral, _slowed(corral, deployment.runs):
        url = corral.url
        clients = Clients(
            lambda: url,
            route(deployment),
            workload,
            seed,
            lambda count: meanwhile(corral, count),
            KEYS if deployment.share_caches else (),
        )
        result = asyncio.run(clients.run())
        headers = {"Authorization": f"Bearer {KEYS[0]}"} if deployment.share_caches else {}
        result.decoded = _decoded(corral.url, headers)
        result.new = asyncio.run(new_tokens.count(corral.url, result.turns, headers))
        return result


@contextmanager
def _slowed(corral: CorralCli, runs: float) -> Iterator[None]:
    """Let the first engine run only for a share of the time, in turns of 40 ms."""
    if runs == 1:
        yield
        return
    pid = corral.data("status")["models"][0]["instances"][0]["pid"]
    ended = threading.Event()

    def turns() -> None:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(_TURN_S * (1 - runs))
            os.kill(pid, signal.SIGCONT)
            time.sleep(_TURN_S * runs)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _decoded(url: str, headers: Mapping[str, str]) -> dict[str, float]:
    request = urllib.request.Request(f"{url}/metrics", headers=dict(headers))  # noqa: S310 (loopback)
    with urllib.request.urlopen(request) as response:  # noqa: S310 (loopback)
        text = response.read().decode()
    line = r'^corral_decoded_tokens_total\{.*model_instance="([^"]+)"\} (\S+)$'
    found = re.findall(line, text, re.MULTILINE)
    return {name: float(tokens) for name, tokens in found}


def _settings(deployment: Deployment, model: Path, keys: Path) -> str:
    is_sticky = deployment.policy == "sticky"
    policy = "least-busy" if is_sticky else deployment.policy
    flags = {**deployment.flags, **ONE_THREAD}
    rendered = _lines(flags)
    replicas = 1 if is_sticky else deployment.replicas
    text = f'[proxy]\nlisten = "127.0.0.1:0"\npolicy = "{policy}"\n'
    text += f"route_by_speed = {_toml(deployment.route_by_speed)}\n"
    if deployment.share_caches:
        text += f'share_caches = "{deployment.share_caches}"\napi_keys_file = "{keys}"\n'
    text += f"\n[supervisor]\n{_lines(deployment.supervisor)}\n"
    for name in "ab" if is_sticky else ["chat"]:
        text += f'\n[models.{name}]\npath = "{model}"\nreplicas = {replicas}\n'
        text += f"[models.{name}.flags]\n{rendered}\n"
    return text


def _lines(values: Mapping[str, object]) -> str:
    return "\n".join(f"{name} = {_toml(value)}" for name, value in values.items())


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
