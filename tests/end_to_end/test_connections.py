"""More connections than a process may have open files: clients with a key are served."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from support.corral_cli import CorralCli

SETTINGS = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "keys.toml"

[models.tiny]
path = "{path}"
"""
SILENT = 1200
# Hangs are longer: a client that is not let in waits a minute.
PATIENCE_S = 120


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process have as many sockets open as the test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * SILENT + 500), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def crowd(address: tuple[str, int], first: bytes, held: ExitStack) -> None:
    """Open connections that send nothing after their first bytes, 200 at a time."""
    loop = asyncio.get_running_loop()

    async def connect() -> None:
        one = held.enter_context(socket.socket())
        one.setblocking(False)  # noqa: FBT003 (the socket's own name for it)
        with suppress(ConnectionError):  # closed at once is as good as silent
            await loop.sock_connect(one, address)
            await loop.sock_sendall(one, first)

    for _ in range(SILENT // 200):
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                group.create_task(connect())


async def ask(url: str, headers: dict[str, str]) -> float:
    """Send one request on a connection of its own; return the seconds it took."""
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    began_at_s = time.monotonic()
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post("/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        assert json.loads(await response.read())["choices"]
    return time.monotonic() - began_at_s


async def ask_amid(url: str, headers: dict[str, str], first: bytes) -> list[float]:
    """Send one request after the other while silent connections open, and five after that."""
    host, port = url.removeprefix("http://").split(":")
    took_s = []
    with ExitStack() as held:
        async with asyncio.TaskGroup() as group:
            coming = group.create_task(crowd((host, int(port)), first, held))
            while not coming.done():
                took_s.append(await ask(url, headers))
        took_s += [await ask(url, headers) for _ in range(5)]
    return took_s


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "])
@pytest.mark.usefixtures("many_files")
def test_silent_connections_do_not_block_a_client_with_a_key(
    corral: CorralCli, tiny_model: Path, first: bytes
) -> None:
    corral.configure(SETTINGS.format(path=tiny_model))
    headers = {"Authorization": f"Bearer {corral.data('key', 'add', 'me')['key']}"}
    daemon = corral.serve(limit="-n 1024")
    engines = {engine.pid for engine in corral.engines()}
    took_s = asyncio.run(ask_amid(corral.url, headers, first))
    assert max(took_s) < PATIENCE_S
    assert daemon.poll() is None
    assert {engine.pid for engine in corral.engines()} == engines
    assert psutil.Process(daemon.pid).memory_info().rss < 200 * 1024**2


def test_the_soft_limit_of_open_files_is_raised(corral: CorralCli, tiny_model: Path) -> None:
    corral.configure(SETTINGS.format(path=tiny_model).replace("api_keys_file", "# api_keys_file"))
    daemon = corral.serve(limit="-S -n 512")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    assert psutil.Process(daemon.pid).rlimit(psutil.RLIMIT_NOFILE)[0] == wanted
