"""The pipe from the host that started the daemon."""

import asyncio
import os

from supervisor.desktop.starter import is_starter_gone, starter_watched


async def test_the_end_of_the_starter_is_noticed() -> None:
    reader, writer = os.pipe()
    closed = asyncio.Event()
    with starter_watched(reader, closed.set):
        assert not is_starter_gone(reader)
        os.close(writer)
        assert is_starter_gone(reader)
        async with asyncio.timeout(5):
            await closed.wait()
    os.close(reader)
