"""Seed 001: requests take the idle slots of the real engine, and leave them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from support import engine as engines
from support.proxy_harness import ProxyHarness, until

from supervisor.builds.discover import Engine

LONG = {"prompt": "abc", "n_predict": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def socket(engine: Engine, slow_model: Path) -> Iterator[Path]:
    options = ["-c", "8192", "-np", "2", "-t", "1", "--no-kv-unified"]
    with engines.running(engine, slow_model, *options) as socket:
        yield socket


async def test_a_request_takes_the_idle_slot_of_an_engine_and_waits_while_it_has_none(
    proxy: ProxyHarness, socket: Path
) -> None:
    proxy.router.admit(engines.upstream(socket, 2))

    async def begin() -> aiohttp.ClientResponse:
        response = await proxy.http.post("/completion", json=LONG)
        await response.content.readline()
        return response

    async def busy() -> set[int]:
        """Return the engine's own slots that are in use."""
        async with (
            aiohttp.UnixConnector(str(socket)) as connector,
            aiohttp.ClientSession(
                connector=connector, headers={"Authorization": f"Bearer {engines.KEY}"}
            ) as session,
            session.get("http://engine/slots") as response,
        ):
            return {slot["id"] for slot in await response.json() if slot["is_processing"]}

    first, second = await begin(), await begin()
    assert await busy() == {0, 1}
    third = asyncio.get_running_loop().create_task(begin())
    await until(
        lambda: [queue.interactive for queue in proxy.router.queues.stats().values()] == [1]
    )
    assert proxy.router.count_in_flight("chat.1") == 2
    first.close()
    (await third).close()
    second.close()
    await until(lambda: not proxy.router.instances()[0].leases)  # the engine says so
    assert await busy() == set()
