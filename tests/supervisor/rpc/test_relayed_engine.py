"""The real engine, split over two real workers, through relays."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from socket import create_server

from support import tiny_gguf
from support.corral_cli import until
from support.slow_worker import worker

from supervisor.builds.discover import Engine
from supervisor.builds.probe import environment
from supervisor.plan.placement import layer_owners
from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.balance import ShardMetrics
from supervisor.rpc.relay import Relay
from supervisor.rpc.shards import split_for

LIMIT_S = 60
TOKENS = 24


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@asynccontextmanager
async def process(engine: Engine, *argv: object) -> AsyncIterator[asyncio.subprocess.Process]:
    env = environment(os.environ, engine.path, engine.library_dirs)
    found = await asyncio.create_subprocess_exec(
        *map(str, argv),
        env=env,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield found
    finally:
        with suppress(ProcessLookupError):
            found.kill()
        await found.wait()


@asynccontextmanager
async def head(
    engine: Engine, model: Path, workers: Sequence[WorkerAddress], split: Sequence[int]
) -> AsyncIterator[int]:
    """Yield the port of an engine that serves a model over these workers."""
    port, rpc = free_port(), ",".join(f"{worker.host}:{worker.port}" for worker in workers)
    options: tuple[object, ...] = ("--port", port, "--tensor-split", ",".join(map(str, split)))
    options += ("--rpc", rpc) if workers else ()  # newer builds abort on an empty list
    fixed = ("--gpu-layers", "all", "--fit", "off", "--threads", 1, "--parallel", 1)
    async with process(engine, engine.path, "--model", model, *options, *fixed):
        await asyncio.to_thread(until, lambda: is_ready(port))
        yield port


def is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=60) as found:
            return bool(found.status == 200)
    except OSError:
        return False


def complete(port: int) -> str:
    body = {"prompt": "the user", "n_predict": TOKENS, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as found:
        return str(json.load(found)["content"])


async def test_every_pass_of_each_shard_is_measured(engine: Engine, tmp_path: Path) -> None:
    """seed 000: ShardMetrics of a real engine; the answer is the same as without workers."""
    model = tiny_gguf.make(tmp_path / "tiny.gguf", layers=6)
    split = split_for((2, 4))
    owners = layer_owners(split, 6)[:-1]
    counts = tuple(map(owners.count, range(len(split))))
    shards = [ShardMetrics(name, count) for name, count in zip("ab", counts, strict=True)]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(LIMIT_S))
        alone = await stack.enter_async_context(head(engine, model, [], [1]))
        expected = await asyncio.to_thread(complete, alone)
        addresses = []
        for shard in shards:
            _, rpc_port = stack.enter_context(worker(engine))
            relay = Relay(WorkerAddress("a", "127.0.0.1", rpc_port), shard.record)
            await stack.enter_async_context(relay.serve())
            addresses.append(relay.address)
        port = await stack.enter_async_context(head(engine, model, addresses, split))
        before = [shard.total_forwards for shard in shards]
        assert await asyncio.to_thread(complete, port) == expected
    passes = [shard.total_forwards - count for shard, count in zip(shards, before, strict=True)]
    # The prompt and each token but the last.
    assert passes == [TOKENS, TOKENS]
    assert all(
        0 < shard.min_latency_us <= shard.avg_latency_us <= shard.max_latency_us for shard in shards
    )
