"""Start, drain, close."""

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness
from support.upstream import Call

from proxy.errors import ListenFailed
from proxy.settings import ProxySettings

EVENT = b"data: 1\n\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Connected:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self) -> bytes:
        """Read until the server closes the connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()


@contextlib.asynccontextmanager
async def connected(address: tuple[str, int], request: bytes = b"") -> AsyncIterator[Connected]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        yield Connected(reader, writer)
    finally:
        writer.close()


async def status(connection: Connected) -> int:
    """Read one response without closing its connection."""
    async with asyncio.timeout(PATIENCE_S):
        head = await connection.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
        await connection.reader.readexactly(length)
    return int(head.split()[1])


async def begin(proxy: ProxyHarness, count: int = 1) -> asyncio.Event:
    """Let an instance begin `count` streams and end them when the returned event is set."""
    end = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await end.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    await proxy.fake(speak)
    return end


async def test_a_taken_port_is_named_with_a_remedy(proxy: ProxyHarness) -> None:
    settings = ProxySettings(listen=f"127.0.0.1:{proxy.server.port}")
    with pytest.raises(ListenFailed) as failure:
        await proxy.build(settings).start()
    assert f":{proxy.server.port}: the port is in use" in failure.value.message
    assert "[proxy]" in failure.value.hint


async def test_a_port_that_is_not_permitted_says_so(
    proxy: ProxyHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", refuse)
    with pytest.raises(ListenFailed, match="not permitted"):
        await proxy.build(ProxySettings(listen="127.0.0.1:80")).start()


async def test_an_address_of_another_machine_cannot_be_listened_on(proxy: ProxyHarness) -> None:
    settings = ProxySettings(listen="192.0.2.1:0")
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        await proxy.build(settings).start()


async def test_streams_end_whole_while_it_drains(proxy: ProxyHarness) -> None:
    end = await begin(proxy)
    async with asyncio.TaskGroup() as group, proxy.ask(stream=True) as response:
        assert await response.content.readany() == EVENT
        draining = group.create_task(proxy.server.drain(60))
        await _refused(proxy)
        assert not draining.done()
        end.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
    assert proxy.events("request.finished")[0]["status"] == 200


async def _refused(proxy: ProxyHarness) -> None:
    """Wait until a request on a new connection is told that the server stops."""
    answer = b""
    while b"X-Corral-Draining: 1\r\n" not in answer:
        async with proxy.raw() as (reader, writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 503 ")


async def test_open_connections_are_told_to_come_back_while_it_drains(proxy: ProxyHarness) -> None:
    end = await begin(proxy)
    async with (
        proxy.raw() as (reader, writer),
        asyncio.TaskGroup() as group,
        proxy.ask(stream=True) as response,
    ):
        await response.content.readany()
        group.create_task(proxy.server.drain(60))
        await _refused(proxy)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = (await reader.read()).decode()  # to the end: the connection is closed
        assert answer.startswith("HTTP/1.1 503 ")
        assert "Retry-After: 1\r\n" in answer
        assert "Connection: close\r\n" in answer
        end.set()


async def test_what_outlasts_the_drain_is_cut_by_the_rules(proxy: ProxyHarness) -> None:
    await begin(proxy)
    async with proxy.stream(EVENT) as reader:
        await proxy.server.drain(0)
        rest = await reader.read()
    assert b'data: {"error":{"message":"the server stopped' in rest
    assert not rest.endswith(b"0\r\n\r\n")


async def test_closing_without_a_drain_cuts_by_the_same_rules(proxy: ProxyHarness) -> None:
    await begin(proxy)
    async with proxy.stream(EVENT) as reader:
        await proxy.server.close()
        assert b"the server stopped" in await reader.read()


async def test_a_second_drain_may_shorten_the_first_and_not_lengthen_it(
    proxy: ProxyHarness,
) -> None:
    await begin(proxy)
    async with asyncio.TaskGroup() as group, proxy.stream(EVENT) as reader:
        group.create_task(proxy.server.drain(600))
        await _refused(proxy)
        group.create_task(proxy.server.drain(0))
        group.create_task(proxy.server.drain(900))
        assert b"the server stopped" in await reader.read()


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(proxy: ProxyHarness) -> None:
    async def flood(call: Call) -> None:
        await call.begin_stream()
        while True:
            await call.chunk(b"x" * 65536 + b"\n\n")

    await proxy.fake(flood)
    async with proxy.ask(stream=True):
        await proxy.server.drain(0)
        async with asyncio.timeout(PATIENCE_S):
            await proxy.server.close()


async def test_an_idle_server_is_gone_at_once_idle_connections_and_all(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/health") as response:
        await response.read()
    async with proxy.raw() as (reader, _):
        async with asyncio.timeout(PATIENCE_S):
            await proxy.server.drain(60)
            await proxy.server.close()
        assert await reader.read() == b""


async def test_requests_that_are_no_http_do_not_fill_the_log(
    proxy: ProxyHarness, caplog: Any
) -> None:
    async with proxy.raw() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        assert b" 400 " in await reader.readline()
        assert caplog.text == ""


async def test_a_header_over_the_limit_is_refused(proxy: ProxyHarness) -> None:
    async with proxy.http.get("/health", headers={"X-Long": "x" * 20_000}) as response:
        assert response.status == 431


async def test_the_url_of_a_public_address_can_be_reached(proxy: ProxyHarness) -> None:
    await proxy.open(listen="0.0.0.0:0")
    assert proxy.server.url == f"http://127.0.0.1:{proxy.server.port}"


@pytest.fixture
def kept() -> Iterator[socket.socket]:
    """A listening socket that outlives each server, as that of a service manager."""
    with socket.create_server(("127.0.0.1", 0)) as kept:
        yield kept


async def test_a_connection_made_before_the_start_is_answered(
    proxy: ProxyHarness, kept: socket.socket
) -> None:
    await proxy.fake()
    address = kept.getsockname()
    async with connected(address, HEALTH) as reader:
        proxy.sockets = [kept.dup()]
        await proxy.open()
        assert (proxy.server.port, await status(reader)) == (address[1], 200)


async def test_while_it_drains_new_connections_wait_and_open_ones_get_a_last_answer(
    proxy: ProxyHarness, kept: socket.socket
) -> None:
    await proxy.fake()
    proxy.sockets = [kept.dup()]
    await proxy.open()
    address = kept.getsockname()
    async with (
        connected(address) as fresh,
        connected(address, HEALTH) as used,
        asyncio.TaskGroup() as group,
    ):
        assert await status(used) == 200
        draining = group.create_task(proxy.server.drain(60))
        await asyncio.sleep(0)  # it has closed its socket
        async with connected(address, HEALTH) as waiting:
            for case in (fresh, used):
                case.writer.write(HEALTH)
                answer = await case.read()
                assert b" 200 " in answer
                assert b"Connection: close" in answer
            await draining
            await proxy.server.close()
            proxy.sockets = [kept.dup()]
            await proxy.open()
            assert await status(waiting) == 200


async def test_a_drain_waits_for_no_client_that_says_nothing(
    proxy: ProxyHarness, kept: socket.socket
) -> None:
    proxy.sockets = [kept.dup()]
    await proxy.open()
    async with connected(kept.getsockname()) as silent:
        async with asyncio.timeout(PATIENCE_S):
            await proxy.server.drain(60)
            await proxy.server.close()
        assert await silent.read() == b""
