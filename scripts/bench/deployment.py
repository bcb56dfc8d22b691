"""Deployments of one model on a few engines, started afresh for each run.

The rivals `hearth-llm` and `smg` from PyPI serve plain engines of the same build. Hearth saves its
only slot to a file after each answer and runs one request at a time; smg sends a prompt to the
engine that had most of it, of two with llama-server's own defaults.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from support.corral_cli import CorralCli, until

from scripts.bench import new_tokens
from scripts.bench.conversations import Clients, Conversation, Workload, WorkloadResult
from scripts.bench.overhead_fronts import free_port
from scripts.bench.plain_engine import plain

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
            number, even if it shares a prefix with others; or `hearth` or `smg`.
        flags: Flags of each engine.
        runs: Share of the time in which the first engine runs; it is stopped for the rest.
        route_by_speed: As in `[proxy]`.
        supervisor: Settings of `[supervisor]`.
        replicas: Engines; `sticky` has two models of one each.
        share_caches: As in `[proxy]`, with five API keys; empty: without keys.
        program: The rival's; None: it is no rival.
        proxy: Further settings of `[proxy]`.
    """

    name: str
    policy: str
    flags: Flags = field(hash=False)
    runs: float = 1.0
    route_by_speed: bool = True
    supervisor: Mapping[str, object] = field(default_factory=dict, hash=False)
    replicas: int = 2
    share_caches: str = ""
    program: str | None = None
    proxy: Mapping[str, object] = field(default_factory=dict, hash=False)

    def with_flags(self, flags: Flags) -> Deployment:
        return replace(self, flags={**self.flags, **flags})


# Other programs save no conversations, so this variant does not either.
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
# As `hearth serve` starts its engine.
HEARTH = Deployment("hearth", "hearth", {"parallel": 1, "ctx-size": 8192}, replicas=1)
# All conversations in progress fit into a context that the slots share.
SMG = Deployment("smg", "smg", {**ENGINE_DEFAULTS, "ctx-size": 16384})


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
    if deployment.program:
        with _rival(deployment, model) as (rival_url, engine_url):
            clients = Clients(lambda: rival_url, route(deployment), workload, seed)
            result = asyncio.run(clients.run())
            counted = asyncio.run(new_tokens.count(engine_url, result.turns))
            result.new, result.distinct = counted
            return result
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
        result.decoded = _tokens("decoded", corral.url, headers)
        result.computed = round(sum(_tokens("prompt", corral.url, headers).values()))
        counted = asyncio.run(new_tokens.count(corral.url, result.turns, headers))
        result.new, result.distinct = counted
        return result


@contextmanager
def reaching(deployment: Deployment, model: Path) -> Iterator[str]:
    """Serve for the length of the block, which gets the URL."""
    with ExitStack() as stack:
        if deployment.program:
            url, _ = stack.enter_context(_rival(deployment, model))
        else:
            url = stack.enter_context(serving(deployment, model)).url
        yield url


@contextmanager
def _rival(deployment: Deployment, model: Path) -> Iterator[tuple[str, str]]:
    """Serve by a rival; the block gets its URL, and that of an engine."""
    with tempfile.TemporaryDirectory(prefix="rival-") as name, ExitStack() as stack:
        home, port = Path(name), str(free_port())
        words = _words({**deployment.flags, **ONE_THREAD})
        words += ["--model", str(model), "--alias", "chat", "--slot-save-path", name]
        engines = [stack.enter_context(plain(*words)) for _ in range(deployment.replicas)]
        argv = [str(deployment.program)]
        if deployment.policy == "hearth":
            argv += ["serve", "--upstream", *engines, "--port", port, "--cache-dir", name]
        else:
            argv += ["launch", "--worker-urls", *engines, "--policy", "cache_aware"]
            argv += ["--disable-tokenizer-autoload", "--host", "127.0.0.1", "--port", port]
            argv += ["--prometheus-port", str(free_port()), "--log-level", "error"]
        with (home / "front.log").open("wb") as log:
            front = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: front.poll() is not None or _answers(url))
            if front.poll() is not None:
                raise RuntimeError(f"{argv[0]}: {(home / 'front.log').read_text()[-2000:]}")
            yield url, engines[0]
        finally:
            front.terminate()
            front.wait()


def _answers(url: str) -> bool:
    """Return whether a front answers a chat: smg accepts connections before it has engines."""
    body = b'{"model": "chat", "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]}'
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)  # noqa: S310 (loopback)
    with suppress(OSError), urllib.request.urlopen(request, timeout=10):  # noqa: S310 (loopback)
        return True
    return False


def _words(flags: Flags) -> list[str]:
    """Return flags as words of a command line."""
    words: list[str] = []
    for flag, value in flags.items():
        words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return words


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


def _tokens(kind: str, url: str, headers: Mapping[str, str]) -> dict[str, float]:
    """Return the tokens of each instance, `prompt` or `decoded`."""
    request = urllib.request.Request(f"{url}/metrics", headers=dict(headers))  # noqa: S310 (loopback)
    with urllib.request.urlopen(request) as response:  # noqa: S310 (loopback)
        text = response.read().decode()
    line = rf'^corral_{kind}_tokens_total\{{.*model_instance="([^"]+)"\}} (\S+)$'
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
    if deployment.proxy:
        text += f"{_lines(deployment.proxy)}\n"
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
