"""One exchange with an instance that has one fault."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict
from support.corral_cli import PATIENCE_S
from support.upstream import Call, Fake, Script
from support.virtual_time import run_in_virtual_time

from proxy.errors import (
    BadRequest,
    ProxyError,
    UpstreamConnectFailed,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnconnected,
)
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest, UpstreamResponse
from proxy.upstream.upstream import Upstream

LETTER = UpstreamRequest(
    "POST", "/completion", "", CIMultiDict({"Content-Type": "application/json"}), b"{}"
)
SETTINGS = ProxySettings(connect_timeout_s=5, upstream_read_timeout_s=20)

Ask = Callable[..., AbstractAsyncContextManager[UpstreamResponse]]


class Bench:
    """An instance played by a script, and exchanges with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fakes: list[Fake] = []

    async def play(self, script: Script) -> None:
        fake = Fake("chat.1", self.directory / "chat.1", script)
        await fake.start()
        self.fakes.append(fake)

    def ask(self, **changes: Any) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a letter; `changes` are members of it, or of the settings."""
        limits = {key: changes.pop(key) for key in list(changes) if key.endswith("_timeout_s")}
        upstream = Upstream("chat.1", "chat", 1, str(self.directory / "chat.1"), "", 0, "inner")
        settings = SETTINGS.model_copy(update=limits)
        return UpstreamResponse(upstream, replace(LETTER, **changes), settings)

    async def fails(self, error: type[ProxyError], **changes: Any) -> str:
        """Return the error of the exchange, or of reading its body to the end."""
        with pytest.raises(error) as failure:
            await self.read(**changes)
        assert type(failure.value) is error
        return failure.value.message

    async def read(self, **changes: Any) -> bytes:
        body = b""
        async with self.ask(**changes) as response:
            while piece := await response.read():
                body += piece
        return body


@pytest.fixture
async def bench(socket_directory: Path) -> Any:
    bench = Bench(socket_directory)
    yield bench
    for fake in bench.fakes:
        await fake.stop()


def saying(*pieces: bytes) -> Script:
    """Return a script that sends these bytes and closes the connection."""

    async def say(call: Call) -> None:
        for piece in pieces:
            await call.send(piece)

    return say


def flooding(beginning: bytes, more: bytes) -> Script:
    """Return a script that sends more and more until it is left."""

    async def flood(call: Call) -> None:
        await call.send(beginning)
        while True:
            await call.send(more * (65536 // len(more)))

    return flood


# The request.


async def test_a_upstream_request_arrives_as_it_was_written(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    headers = CIMultiDict([("X-One", "1"), ("X-Two", "ä")])
    await bench.read(query="a=%20", headers=headers, body=b"12345")
    call = bench.fakes[0].calls.get_nowait()
    assert call.line == "POST /completion?a=%20 HTTP/1.1"
    assert call.body == b"12345"
    assert call.headers == {
        "Host": "localhost",
        "X-One": "1",
        "X-Two": "ä",
        "Accept-Encoding": "identity",
        "Connection": "close",
        "Authorization": "Bearer inner",
        "Content-Length": "5",
    }


async def test_bytes_that_are_no_text_go_on_as_they_came(bench: Bench) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert b"\r\nX-Raw: a\xffb\r\n" in await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_unix_server(serve, bench.directory / "chat.1"):
        assert await bench.read(headers=CIMultiDict({"X-Raw": "a\udcffb"})) == b""


async def test_a_upstream_request_without_a_body_says_nothing_of_one(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    await bench.read(method="GET", body=b"")
    assert "Content-Length" not in bench.fakes[0].calls.get_nowait().headers


async def test_a_body_larger_than_a_packet_arrives_whole(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    await bench.read(body=b"x" * 1_000_000)
    assert len(bench.fakes[0].calls.get_nowait().body) == 1_000_000


@pytest.mark.parametrize("value", ["a\r\nB: c", "a\nb", "a\rb", "a\0b"])
async def test_a_field_cannot_smuggle_another(bench: Bench, value: str) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    assert "line break" in await bench.fails(BadRequest, headers=CIMultiDict({"A": value}))
    assert bench.fakes[0].calls.empty()


# The response.


async def test_what_arrived_before_a_break_is_still_read(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfirst"))
    async with bench.ask() as response:
        assert await response.read() == b"first"
        with pytest.raises(UpstreamFailed, match=r"chat\.1 broke off its answer"):
            await response.read()


async def test_an_answer_ends_where_it_ends_though_the_connection_does_not(bench: Bench) -> None:
    left = asyncio.Event()

    async def stay(call: Call) -> None:
        await call.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more")
        await call.until_left()
        left.set()

    await bench.play(stay)
    async with bench.ask() as response:
        assert await response.read() == b"ok"
        assert await response.read() == b""
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()  # a complete answer has closed the connection already


async def test_that_a_body_was_read_is_known_with_its_last_bytes(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlast"))
    async with bench.ask() as response:
        assert not response.is_read
        assert await response.read() == b"last"
        assert response.is_read


async def test_a_body_without_a_length_is_read_to_the_end(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n", b"all", b" of it"))
    assert await bench.read() == b"all of it"


async def test_what_comes_while_it_is_waited_for_is_taken_in_the_same_step(bench: Bench) -> None:
    said: asyncio.Queue[bytes] = asyncio.Queue()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        while (piece := await said.get()) != b"last":
            await call.chunk(piece)
        await call.send(b"4\r\nlast\r\n0\r\n\r\n")

    await bench.play(speak)
    async with bench.ask() as response:
        taken: list[bytes] = []

        def take(piece: bytes, chunk: bytes) -> bool:
            if piece == b"no room":
                return False
            assert chunk == b"%x\r\n%b\r\n" % (len(piece), piece)
            taken.append(piece)
            said.put_nowait({b"one": b"two", b"two": b"no room"}.get(piece, b"last"))
            return True

        said.put_nowait(b"one")
        assert await response.read(take) == b"no room"
        assert taken == [b"one", b"two"]
        said.put_nowait(b"three")
        assert await response.read(take) == b"last"  # the end is never taken
        assert taken == [b"one", b"two", b"three"]
        assert response.is_read


async def test_an_exchange_that_is_left_closes_the_connection(bench: Bench) -> None:
    left = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"one")
        await call.until_left()
        left.set()

    await bench.play(speak)
    async with bench.ask() as response:
        assert await response.read() == b"one"
    async with asyncio.timeout(PATIENCE_S):
        await left.wait()


async def test_nobody_reads_so_nothing_more_is_taken(bench: Bench) -> None:
    sent, stuck = 0, asyncio.Event()

    async def speak(call: Call) -> None:
        nonlocal sent
        await call.begin_stream()
        try:
            while True:
                async with asyncio.timeout(0.3):  # the test is about the end of this wait
                    await call.chunk(b"x" * 65536)
                sent += 65536
        except TimeoutError:
            stuck.set()
            await call.end()

    await bench.play(speak)
    async with bench.ask() as response:
        await stuck.wait()
        assert sent < 4_000_000
        taken = 0
        while piece := await response.read():
            assert len(piece) < 1_000_000
            taken += len(piece)
    assert taken in {sent, sent + 65536}  # the chunk that was stuck is whole once it is read


# Failures.


async def test_nobody_listens(bench: Bench) -> None:
    assert "takes no connection" in await bench.fails(UpstreamUnconnected)


async def test_a_port_without_a_listener() -> None:
    upstream = Upstream("chat.1", "chat", 1, None, "127.0.0.1", 1, "")
    with pytest.raises(UpstreamConnectFailed, match="takes no connection"):
        async with UpstreamResponse(upstream, LETTER, SETTINGS):
            pass


async def test_a_connection_that_is_not_accepted_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(type(asyncio.get_running_loop()), "create_connection", hang)
    upstream = Upstream("chat.1", "chat", 1, None, "127.0.0.1", 1, "")
    with pytest.raises(UpstreamConnectFailed, match=r"chat\.1 takes no connection in time"):
        async with UpstreamResponse(
            upstream, LETTER, SETTINGS.model_copy(update={"connect_timeout_s": 0.01})
        ):
            pass


async def test_a_socket_with_no_place_left_for_a_connection_is_not_waited_for(
    socket_directory: Path,
) -> None:
    path = str(socket_directory / "chat.1")
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket(socket.AF_UNIX))
        deaf.bind(path)
        deaf.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(path)
        upstream = Upstream("chat.1", "chat", 1, path, "", 0, "inner")
        with pytest.raises(UpstreamConnectFailed):
            async with UpstreamResponse(upstream, LETTER, SETTINGS):
                pass


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_an_end_before_the_answer_can_be_tried_again(bench: Bench, said: bytes) -> None:
    await bench.play(saying(said))
    message = await bench.fails(UpstreamConnectFailed)
    assert message == "chat.1 closed the connection without an answer"


async def test_a_reset_before_the_answer_can_be_tried_again(bench: Bench) -> None:
    async def drop(call: Call) -> None:
        call.drop()

    await bench.play(drop)
    await bench.fails(UpstreamConnectFailed)


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2",
        b"<html>\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_what_is_no_answer_is_a_failure(bench: Bench, said: bytes) -> None:
    async def speak(call: Call) -> None:
        await call.send(said)
        await call.until_left()

    await bench.play(speak)
    assert "sent an invalid HTTP response" in await bench.fails(UpstreamFailed)


async def test_a_key_that_is_refused_is_no_fault_of_the_client(bench: Bench) -> None:
    await bench.play(saying(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"))
    assert "does not know our key" in await bench.fails(UpstreamFailed)


@pytest.mark.parametrize(
    "body", [b"", b"5\r\nab", b"zz\r\n", b"2\r\nabcd\r\n", b"2\r\nab\r\n0\r\n"]
)
async def test_a_body_that_breaks_off_or_lies_is_a_failure(bench: Bench, body: bytes) -> None:
    await bench.play(saying(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body))
    assert await bench.fails(UpstreamFailed) == "chat.1 broke off its answer"


@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (b"HTTP/1.1 200 ", b"x"),
        (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
    ],
)
async def test_a_flood_outside_of_the_body_ends_the_exchange(
    bench: Bench, beginning: bytes, more: bytes
) -> None:
    await bench.play(flooding(beginning, more))
    await bench.fails(UpstreamFailed)


async def test_silence_before_the_answer(bench: Bench) -> None:
    await bench.play(Call.until_left)
    message = await bench.fails(UpstreamTimeout, upstream_read_timeout_s=0.05)
    assert message == "chat.1 did not begin to answer in time"


async def test_silence_within_the_answer(bench: Bench) -> None:
    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"one")
        await call.until_left()

    await bench.play(speak)
    async with bench.ask(upstream_read_timeout_s=0.2) as response:
        assert await response.read() == b"one"
        with pytest.raises(UpstreamTimeout, match="stopped sending its answer"):
            await response.read()


def test_what_is_taken_at_once_ends_a_silence_too() -> None:
    taken: list[bytes] = []

    def take(piece: bytes, chunk: bytes) -> bool:
        assert not chunk  # a body that ends with the connection
        taken.append(piece)
        return True

    class Line(asyncio.Transport):
        def abort(self) -> None:
            pass

        def write(self, data: bytes | bytearray | memoryview) -> None:
            pass

    async def read() -> None:
        loop = asyncio.get_running_loop()
        upstream = Upstream("chat.1", "chat", 1, None, "", 0, "")
        settings = ProxySettings(upstream_read_timeout_s=10)
        connection = UpstreamResponse(upstream, LETTER, settings)
        connection.connection_made(Line())
        connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
        for after_s in (6, 12, 18):
            loop.call_later(after_s, connection.data_received, b"more")
        with pytest.raises(UpstreamTimeout):
            await connection.read(take)

    run_in_virtual_time(read())
    assert taken == [b"more"] * 3


async def test_a_reader_that_takes_its_time_is_not_the_instances_silence(bench: Bench) -> None:
    read_on = asyncio.Event()

    async def speak(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b"one")
        await read_on.wait()
        await call.chunk(b"two")
        await call.end()

    await bench.play(speak)
    async with bench.ask(upstream_read_timeout_s=0.1) as response:
        assert await response.read() == b"one"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.25):  # the reader, busy elsewhere
                await asyncio.Event().wait()
        read_on.set()
        assert await response.read() == b"two"


async def test_a_descriptor_is_not_closed_a_second_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop detaches a `socket.socket`, and closes the descriptor of another class once more."""
    loop, used = asyncio.get_running_loop(), []
    connect = loop.create_unix_connection

    async def note(protocol: Any, *, sock: socket.socket) -> Any:
        used.append(sock)
        return await connect(protocol, sock=sock)

    monkeypatch.setattr(loop, "create_unix_connection", note)
    await bench.play(saying(b"HTTP/1.1 200 OK\r\n\r\n"))
    await bench.read()
    assert all(isinstance(connection, socket.socket) for connection in used)
    assert len(used) == 1
