"""A relay between an engine, or a client in its place, and a worker."""

from __future__ import annotations

import asyncio
import socket
from asyncio.streams import FlowControlMixin
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop
from support.corral_cli import PATIENCE_S

from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.relay import Relay, pump

COMPUTE = bytes([10]) + (4).to_bytes(8, "little") + b"node"
SET_TENSOR = bytes([6])
GET_TENSOR = bytes([8]) + (0).to_bytes(8, "little")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def ignore(_latency_us: int) -> None:
    pass


@asynccontextmanager
async def worker(serve: Serve) -> AsyncIterator[WorkerAddress]:
    """Serve until the block ends; every connection must have been closed by then."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await serve(reader, writer)
        await close(writer)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.get_running_loop().create_task(handle(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield WorkerAddress("a", "127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        if tasks:
            await asyncio.wait(tasks)


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@asynccontextmanager
async def relayed(
    serve: Serve, on_forward: Callable[[int], None] = ignore
) -> AsyncIterator[Streams]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(PATIENCE_S))
        relay = Relay(await stack.enter_async_context(worker(serve)), on_forward)
        await stack.enter_async_context(relay.serve())
        reader, writer = await asyncio.open_connection(relay.address.host, relay.address.port)
        stack.push_async_callback(close, writer)
        yield reader, writer


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(65536):
        writer.write(chunk)
        await writer.drain()


async def send(writer: asyncio.StreamWriter, size_bytes: int) -> None:
    """Send one command of this size."""
    writer.write(SET_TENSOR + size_bytes.to_bytes(8, "little"))
    for _ in range(size_bytes // 1024**2):
        writer.write(bytes(1024**2))
        await writer.drain()


async def assert_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        assert await reader.read() == b""


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_bytes_pass_unchanged_in_both_directions(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """seed 000"""
    sent = bytes(range(256)) * 40_000

    async def exchange() -> None:
        async with relayed(echo) as (reader, writer):
            writer.write(sent)
            assert await reader.readexactly(len(sent)) == sent

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(exchange())


async def test_a_pass_is_timed_until_the_next_response() -> None:
    """seed 000: record"""
    found: list[int] = []

    async def compute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(COMPUTE + GET_TENSOR))
        asyncio.get_running_loop().call_later(0.05, writer.write, b"answer")
        await reader.read()

    async with relayed(compute, found.append) as (reader, writer):
        writer.write(COMPUTE + GET_TENSOR)
        assert await reader.readexactly(6) == b"answer"
    assert len(found) == 1
    assert found[0] >= 45_000


async def test_a_pass_is_timed_from_before_it_is_passed_on() -> None:
    """The worker may have the processor until it has computed; the relay goes on after that."""
    order = list[str]()

    async def drain() -> None:
        order.append("drained")

    transport = SimpleNamespace(set_write_buffer_limits=lambda **_: None)
    writer = SimpleNamespace(
        transport=transport, write=lambda _: order.append("written"), drain=drain
    )
    reader = asyncio.StreamReader()
    reader.feed_data(COMPUTE)
    reader.feed_eof()
    await pump(reader, cast("asyncio.StreamWriter", writer), lambda _: order.append("noted"))
    assert order == ["noted", "written", "drained"]


async def test_a_response_without_a_pass_is_not_timed() -> None:
    """seed 000: record"""
    found: list[int] = []
    async with relayed(echo, found.append) as (reader, writer):
        writer.write(GET_TENSOR)
        assert await reader.readexactly(len(GET_TENSOR)) == GET_TENSOR
    assert found == []


async def test_a_worker_that_does_not_read_stops_the_engine_from_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resume, paused = asyncio.Event(), asyncio.Event()
    writers = set[asyncio.BaseProtocol]()
    pause = FlowControlMixin.pause_writing

    def pause_writing(protocol: FlowControlMixin) -> None:
        pause(protocol)
        writers.add(protocol)
        if len(writers) == 2:  # that of the engine and that to the worker
            paused.set()

    monkeypatch.setattr(FlowControlMixin, "pause_writing", pause_writing)

    async def slow(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await resume.wait()
        while await reader.read(1024**2):
            pass

    async with relayed(slow) as (_, writer), asyncio.TaskGroup() as group:
        # More than the buffers of four sockets and the relay.
        sending = group.create_task(send(writer, 64 * 1024**2))
        await paused.wait()
        assert not sending.done()
        resume.set()


async def test_a_worker_that_is_gone_closes_the_connection() -> None:
    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with relayed(hang_up) as (reader, _):
        assert await reader.read() == b""


async def test_a_worker_that_does_not_listen_closes_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    relay = Relay(WorkerAddress("a", "127.0.0.1", port), ignore)
    async with asyncio.timeout(PATIENCE_S), relay.serve():
        reader, writer = await asyncio.open_connection(relay.address.host, relay.address.port)
        await assert_closed(reader)
        await close(writer)


async def test_at_its_end_every_connection_is_closed() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(COMPUTE))
        began.set()
        await assert_closed(reader)
        ended.set()

    async with asyncio.timeout(PATIENCE_S), worker(wait) as address:
        relay = Relay(address, ignore)
        async with relay.serve():
            reader, writer = await asyncio.open_connection(relay.address.host, relay.address.port)
            writer.write(COMPUTE)
            await began.wait()
        await assert_closed(reader)
        await ended.wait()
        await close(writer)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(relay.address.host, relay.address.port)


def test_it_listens_on_loopback_and_can_be_closed_unused() -> None:
    relay = Relay(WorkerAddress("a", "127.0.0.1", 1), ignore)
    assert relay.address.host == "127.0.0.1"
    assert relay.address.port > 0
    relay.close()
