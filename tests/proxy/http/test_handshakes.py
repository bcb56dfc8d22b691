"""Connections whose TLS handshake has not ended, and the limit of connections."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme
from support.certificates import trusting, write
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness
from support.upstream import Call, say_ok

from proxy.settings import TlsSettings

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
LIMIT = 8


@pytest.fixture
async def client(proxy: ProxyHarness, tmp_path: Path) -> ssl.SSLContext:
    """Start the proxy with TLS; return a client's context."""
    authority = trustme.CA()
    files = write(tmp_path, authority.issue_cert("127.0.0.1"))
    await proxy.open(tls=TlsSettings(**files), max_connections=LIMIT)
    return trusting(authority)


@pytest.fixture
def crowd() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@dataclass
class Tls:
    """TLS that says nothing on its own, not even that it ends."""

    socket: socket.socket
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    object: ssl.SSLObject = field(init=False)

    async def send(self) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, self.outgoing.read())

    async def receive(self) -> None:
        self.incoming.write(await asyncio.get_running_loop().sock_recv(self.socket, 65536))


async def silent(proxy: ProxyHarness, crowd: contextlib.ExitStack) -> socket.socket:
    """Connect, and never begin a handshake."""
    one = crowd.enter_context(socket.socket())
    one.settimeout(0)
    await asyncio.get_running_loop().sock_connect(one, ("127.0.0.1", proxy.server.port))
    return one


async def shake(connection: socket.socket, client: ssl.SSLContext) -> Tls:
    """Do a handshake by hand; its last flight waits to be sent."""
    tls = Tls(connection, ssl.MemoryBIO(), ssl.MemoryBIO())
    tls.object = client.wrap_bio(tls.incoming, tls.outgoing, server_hostname="127.0.0.1")
    while True:
        try:
            tls.object.do_handshake()
        except ssl.SSLWantReadError:
            await tls.send()
            await tls.receive()
        else:
            return tls


async def begin(
    proxy: ProxyHarness, client: ssl.SSLContext, sent: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port, ssl=client)
    writer.write(sent)
    return reader, writer


async def speak_well(proxy: ProxyHarness, client: ssl.SSLContext) -> None:
    reader, writer = await begin(proxy, client, GET)
    assert b" 200 " in await reader.readline()
    writer.transport.abort()


async def test_silent_handshakes_lock_no_client_out(
    proxy: ProxyHarness, client: ssl.SSLContext, crowd: contextlib.ExitStack
) -> None:
    before = descriptors()
    opened = [await silent(proxy, crowd) for _ in range(5 * LIMIT)]
    for _ in range(LIMIT):
        await speak_well(proxy, client)
    assert descriptors() <= before + len(opened) + LIMIT + 1  # the last client
    assert await asyncio.get_running_loop().sock_recv(opened[0], 1) == b""


async def test_silence_after_the_handshake_locks_no_client_out(
    proxy: ProxyHarness, client: ssl.SSLContext, crowd: contextlib.ExitStack
) -> None:
    before = descriptors()
    for _ in range(5 * LIMIT):
        await (await shake(await silent(proxy, crowd), client)).send()
    for _ in range(LIMIT):
        await speak_well(proxy, client)
    assert descriptors() <= before + 5 * LIMIT + LIMIT + 1


async def test_a_request_under_way_is_not_cut_for_a_handshake(
    proxy: ProxyHarness, client: ssl.SSLContext
) -> None:
    may_end = asyncio.Event()

    async def wait(call: Call) -> None:
        await may_end.wait()
        await say_ok(call)

    fake = await proxy.fake(wait)
    asked = [await begin(proxy, client, POST) for _ in range(LIMIT)]
    for _ in asked:
        await fake.calls.get()
    with pytest.raises(ConnectionError):
        await begin(proxy, client)
    may_end.set()
    for reader, writer in asked:
        assert b" 200 " in await reader.readline()
        writer.transport.abort()
    await speak_well(proxy, client)


async def test_what_comes_with_the_end_of_a_handshake_is_not_lost(
    proxy: ProxyHarness, client: ssl.SSLContext, crowd: contextlib.ExitStack
) -> None:
    tls = await shake(await silent(proxy, crowd), client)
    tls.object.write(GET)
    await tls.send()
    answer = b""
    while b"\r\n" not in answer:
        await tls.receive()
        with contextlib.suppress(ssl.SSLWantReadError):
            answer += tls.object.read()
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_silent_handshake_ends_in_time_and_frees_its_place(
    proxy: ProxyHarness, client: ssl.SSLContext, crowd: contextlib.ExitStack
) -> None:
    await proxy.open(header_timeout_s=0.1)
    before = descriptors()
    one = await silent(proxy, crowd)
    assert await asyncio.get_running_loop().sock_recv(one, 1) == b""
    assert descriptors() == before + 1


async def test_handshakes_end_with_the_server(
    proxy: ProxyHarness, client: ssl.SSLContext, crowd: contextlib.ExitStack
) -> None:
    await speak_well(proxy, client)
    opened = [await silent(proxy, crowd) for _ in range(LIMIT)]
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await proxy.server.close()
        for file in opened:
            with contextlib.suppress(ConnectionError):
                assert await asyncio.get_running_loop().sock_recv(file, 1) == b""
