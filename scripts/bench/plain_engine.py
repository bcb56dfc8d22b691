"""A llama-server without llama-corral, started with its own defaults."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aiohttp
from support.corral_cli import until

from scripts.bench.mixed_requests import session
from scripts.bench.overhead_fronts import free_port
from supervisor.builds.discover import Engine, load
from supervisor.system.paths import directories


@contextmanager
def plain(
    *words: str | Path, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[str]:
    """Serve with these words on the command line, after an address; the block gets the URL.

    Args:
        env: Added to the environment.
        log: Where its output goes; nowhere without one.
    """
    engine: Engine = load(None, cache_dir=directories().cache)
    port = free_port()
    libraries = ":".join(map(str, engine.library_dirs))
    with (log or Path(os.devnull)).open("wb") as output:
        process = subprocess.Popen(
            [*engine.command, "--port", str(port), *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
                **(env or {}),
            },
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _has_ended(process) or asyncio.run(is_healthy(url)))
        if _has_ended(process):
            raise RuntimeError(f"llama-server ended with {process.returncode}")
        yield url
    finally:
        process.terminate()
        process.wait()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


async def is_healthy(url: str) -> bool:
    try:
        async with session(url) as http, http.get("/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False
