"""A proxy with fake instances behind it, on both event loops that production may have."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import uvloop
from fakes.proxy_harness import ProxyHarness


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every asynchronous test of this directory on both."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


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
