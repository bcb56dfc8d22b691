"""Start, drain, close."""

import asyncio
import contextlib
import errno
from typing import Any

import pytest
from fakes.house import House
from fakes.upstream import Call

from proxy.errors import ListenFailed
from proxy.settings import ProxySettings

EVENT = b"data: 1\n\n"


async def begin(house: House, count: int = 1) -> asyncio.Event:
    """Let an instance begin `count` streams and end them when the returned event is set."""
    end = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(EVENT)
        await end.wait()
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    await house.fake(speak)
    return end


async def test_a_taken_port_is_named_with_what_to_do(house: House) -> None:
    settings = ProxySettings(port=house.server.port)
    with pytest.raises(ListenFailed) as failure:
        await house.build(settings).start()
    assert failure.value.port == house.server.port
    assert "the port is in use" in failure.value.message
    assert "[proxy]" in failure.value.hint


async def test_a_port_that_is_not_permitted_says_so(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_server", refuse)
    with pytest.raises(ListenFailed, match="not permitted"):
        await house.build(ProxySettings(port=80)).start()


async def test_an_address_of_another_machine_cannot_be_listened_on(house: House) -> None:
    settings = ProxySettings(host="192.0.2.1", port=0)
    with pytest.raises(ListenFailed, match=r"cannot listen on 192\.0\.2\.1:0"):
        await house.build(settings).start()


async def test_streams_end_whole_while_it_drains(house: House) -> None:
    end = await begin(house)
    async with asyncio.TaskGroup() as group, house.ask(stream=True) as response:
        assert await response.content.readany() == EVENT
        draining = group.create_task(house.server.drain(60))
        await _refused(house)
        assert not draining.done()
        end.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
    assert house.events("request.finished")[0]["status"] == 200


async def _refused(house: House) -> None:
    """Wait until no new connection is taken."""
    with contextlib.suppress(ConnectionError):
        while True:
            async with house.raw():
                pass


async def test_open_connections_are_told_to_come_back_while_it_drains(house: House) -> None:
    end = await begin(house)
    async with (
        house.raw() as (reader, writer),
        asyncio.TaskGroup() as group,
        house.ask(stream=True) as response,
    ):
        await response.content.readany()
        group.create_task(house.server.drain(60))
        await _refused(house)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = (await reader.read()).decode()  # to the end: the connection is closed
        assert answer.startswith("HTTP/1.1 503 ")
        assert "Retry-After: 1\r\n" in answer
        assert "Connection: close\r\n" in answer
        end.set()


async def test_what_outlasts_the_drain_is_cut_by_the_rules(house: House) -> None:
    await begin(house)
    async with house.stream(EVENT) as reader:
        await house.server.drain(0)
        rest = await reader.read()
    assert b'data: {"error":{"message":"the server stopped' in rest
    assert not rest.endswith(b"0\r\n\r\n")


async def test_closing_without_a_drain_cuts_by_the_same_rules(house: House) -> None:
    await begin(house)
    async with house.stream(EVENT) as reader:
        await house.server.close()
        assert b"the server stopped" in await reader.read()


async def test_a_second_drain_may_shorten_the_first_and_not_lengthen_it(house: House) -> None:
    await begin(house)
    async with asyncio.TaskGroup() as group, house.stream(EVENT) as reader:
        group.create_task(house.server.drain(600))
        await _refused(house)
        group.create_task(house.server.drain(0))
        group.create_task(house.server.drain(900))
        assert b"the server stopped" in await reader.read()


async def test_a_client_that_reads_nothing_does_not_hold_up_the_end(house: House) -> None:
    async def flood(call: Call) -> None:
        await call.begin_stream()
        while True:
            await call.chunk(b"x" * 65536 + b"\n\n")

    await house.fake(flood)
    async with house.ask(stream=True):
        await house.server.drain(0)
        async with asyncio.timeout(20):
            await house.server.close()


async def test_an_idle_server_is_gone_at_once_idle_connections_and_all(house: House) -> None:
    async with house.http.get("/health") as response:
        await response.read()
    async with house.raw() as (reader, _):
        async with asyncio.timeout(20):
            await house.server.drain(60)
            await house.server.close()
        assert await reader.read() == b""


async def test_requests_that_are_no_http_do_not_fill_the_log(house: House, caplog: Any) -> None:
    async with house.raw() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nno header\r\n\r\n")
        assert b" 400 " in await reader.readline()
        assert caplog.text == ""


async def test_a_header_over_the_limit_is_refused(house: House) -> None:
    async with house.http.get("/health", headers={"X-Long": "x" * 20_000}) as response:
        assert response.status == 431


async def test_the_url_of_a_public_address_is_one_that_can_be_asked(house: House) -> None:
    await house.open(host="0.0.0.0")  # noqa: S104 (what is tested)
    assert house.server.url == f"http://127.0.0.1:{house.server.port}"
