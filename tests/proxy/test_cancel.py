"""A client leaves: the real engine's slot is idle again, while it still speaks to another."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from support import engine as engines
from support.proxy_harness import ProxyHarness, until

from proxy.router.lease import LeaseStats
from supervisor.builds.discover import Engine

# The engine needs far less; only a slot that is never given back takes this long.
PATIENCE_S = 120
LONG = {"model": "chat", "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def socket(engine: Engine, smollm2: Path) -> Iterator[Path]:
    options = ["-c", "16384", "-np", "2", "-t", "1", "-b", "256", "--no-kv-unified"]
    with engines.running(engine, smollm2, *options) as socket:
        yield socket


@pytest.fixture
async def proxy(socket: Path) -> AsyncIterator[ProxyHarness]:
    async with engines.proxied(socket, 2) as proxy:
        yield proxy


def hello(name: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"I am {name}. Tell a long story."}]


def leases(proxy: ProxyHarness) -> dict[str, LeaseStats]:
    return {lease.request_id: lease for lease in proxy.router.instances()[0].leases}


def is_in(proxy: ProxyHarness, phase: Literal["prefill", "decode"]) -> Callable[[], bool]:
    """Return a claim: the request `leaver` is at the engine, and this far."""

    def claim() -> bool:
        facts = leases(proxy).get("leaver")
        return facts is not None and facts.phase == phase and facts.prompt_done > 0

    return claim


def waits(proxy: ProxyHarness, count: int) -> Callable[[], bool]:
    return lambda: proxy.router.queues.stats()["chat"].interactive == count


@asynccontextmanager
async def speaking(proxy: ProxyHarness, name: str = "other") -> AsyncIterator[None]:
    """Have the engine speak to somebody else all the while."""
    body = {**LONG, "messages": hello(name), "stream": True}
    async with proxy.http.post("/v1/chat/completions", json=body) as response:
        await response.content.readuntil(b"content")
        reading = asyncio.get_running_loop().create_task(_read(response))
        yield
        assert not reading.done()
        reading.cancel()
        await asyncio.wait([reading])


async def _read(response: aiohttp.ClientResponse) -> None:
    async for _ in response.content.iter_any():
        pass


async def leave(
    proxy: ProxyHarness,
    body: dict[str, Any],
    when: Callable[[], bool],
    page: str = "/v1/chat/completions",
) -> None:
    """Ask, and hang up as soon as a claim holds."""

    async def asking() -> None:
        headers = {"X-Request-Id": "leaver"}
        async with proxy.http.post(page, json={**LONG, **body}, headers=headers) as response:
            await _read(response)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(asking())
        await until(when)
        task.cancel()


async def until_busy(socket: Path, count: int) -> None:
    """Wait until the engine itself says that so many of its slots are in use."""
    async with (
        asyncio.timeout(PATIENCE_S),
        aiohttp.ClientSession(
            "http://engine",
            connector=aiohttp.UnixConnector(str(socket)),
            headers={"Authorization": f"Bearer {engines.KEY}"},
        ) as session,
    ):
        while True:
            async with session.get("/slots") as response:
                slots = json.loads(await response.read())
            if sum(slot["is_processing"] for slot in slots) == count:
                return
            await asyncio.sleep(0.02)  # an engine that answers all the time notices no disconnect


async def test_who_leaves_mid_stream_frees_the_slot(proxy: ProxyHarness, socket: Path) -> None:
    async with speaking(proxy):
        await leave(proxy, {"messages": hello("a"), "stream": True}, is_in(proxy, "decode"))
        await until_busy(socket, 1)


@pytest.mark.parametrize(
    ("page", "members"),
    [
        ("/v1/chat/completions", {"messages": hello("b")}),
        ("/v1/messages", {"messages": hello("b")}),
        ("/v1/responses", {"input": hello("b"), "max_output_tokens": 4000}),
        ("/completion", {"prompt": "Once upon a time", "n_predict": 4000}),
    ],
)
async def test_who_leaves_before_a_whole_answer_frees_the_slot(
    proxy: ProxyHarness, socket: Path, page: str, members: dict[str, Any]
) -> None:
    async with speaking(proxy):
        await leave(proxy, members, is_in(proxy, "decode"), page)
        await until_busy(socket, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_while_the_prompt_is_computed_frees_the_slot(
    proxy: ProxyHarness, socket: Path, *, stream: bool
) -> None:
    prompt = f"{stream} " + " ".join(str(number) for number in range(900))
    messages = [{"role": "user", "content": prompt}]
    async with speaking(proxy):
        await leave(proxy, {"messages": messages, "stream": stream}, is_in(proxy, "prefill"))
        await until_busy(socket, 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_the_line_was_never_at_the_engine(
    proxy: ProxyHarness, socket: Path, *, stream: bool
) -> None:
    async with speaking(proxy, "one"), speaking(proxy, "two"):
        await leave(proxy, {"messages": hello("c"), "stream": stream}, waits(proxy, 1))
        await until(waits(proxy, 0))
        await until_busy(socket, 2)
    await until_busy(socket, 0)
    (left,) = [event for event in proxy.events("request.finished") if event["request"] == "leaver"]
    assert (left["status"], left["instance"]) == (499, None)
