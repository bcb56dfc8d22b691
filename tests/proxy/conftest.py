"""A proxy with fake instances behind it.

Tests of connections run on both event loops that production may have (asyncio's where there is no
uvloop); the others, whose code sees no difference, on uvloop alone.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from support.proxy_harness import ProxyHarness

_BOTH_LOOPS = {
    *("test_cancel.py", "test_client.py", "test_connection.py", "test_connections.py"),
    *("test_forward.py", "test_relay.py", "test_response.py", "test_server.py"),
    *("test_handshakes.py", "test_listener.py"),
}


def pytest_asyncio_loop_factories(
    item: pytest.Item,
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    return loops | {"asyncio": asyncio.new_event_loop} if item.path.name in _BOTH_LOOPS else loops


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    # pytest's own directories are too long for a unix socket.
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        yield Path(directory)


@pytest.fixture
async def proxy(socket_directory: Path) -> AsyncIterator[ProxyHarness]:
    async with AsyncExitStack() as stack:
        proxy = ProxyHarness(socket_directory, stack)
        await proxy.open()
        yield proxy
