"""The proxy's listener with TLS, and real connections to it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from support.certificates import serial, trusting, write, write_ca
from support.proxy_harness import ProxyHarness
from support.upstream import Call

from proxy.settings import TlsSettings

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
STREAM = (
    b'POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n{"stream":true}'
)

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@asynccontextmanager
async def connected(proxy: ProxyHarness, context: ssl.SSLContext) -> AsyncIterator[Pair]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.server.port, ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def get(proxy: ProxyHarness, context: ssl.SSLContext) -> bytes:
    """Return the first line of an answer."""
    async with connected(proxy, context) as (reader, writer):
        writer.write(GET)
        return await reader.readline()


async def shown(proxy: ProxyHarness, context: ssl.SSLContext) -> str:
    """Return the certificate that the proxy shows after a look at its files."""
    assert proxy.tls
    proxy.tls.renew()
    async with connected(proxy, context) as (_, writer):
        return serial(writer)


async def test_clients_connect_by_tls_and_only_by_tls(
    proxy: ProxyHarness, authority: trustme.CA, tmp_path: Path
) -> None:
    files = write(tmp_path, authority.issue_cert("127.0.0.1"))
    await proxy.open(tls=TlsSettings(**files))
    assert proxy.server.url == f"https://127.0.0.1:{proxy.server.port}"
    assert b"HTTP/1.1" in await get(proxy, trusting(authority))
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        await get(proxy, trusting(trustme.CA()))
    async with proxy.raw() as (reader, writer):
        writer.write(GET)
        assert b"HTTP" not in await reader.read()
    old = trusting(authority)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        await get(proxy, old)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_without_an_accepted_certificate_is_told_so(
    proxy: ProxyHarness, authority: trustme.CA, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    files = write(tmp_path, authority.issue_cert("127.0.0.1"))
    clients = trustme.CA()
    client_ca = write_ca(tmp_path / "clients.pem", clients)
    await proxy.open(tls=TlsSettings(**files, client_ca=client_ca))

    def client(own: trustme.LeafCert | None) -> ssl.SSLContext:
        context = trusting(authority, own)
        context.maximum_version = version
        return context

    assert b"HTTP/1.1" in await get(proxy, client(clients.issue_cert("me")))
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required|handshake.failure"):
        await get(proxy, client(None))
    with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca"):
        await get(proxy, client(trustme.CA().issue_cert("me")))


async def test_a_renewed_certificate_is_taken_without_cutting_a_stream(
    proxy: ProxyHarness, authority: trustme.CA, tmp_path: Path
) -> None:
    may_end = asyncio.Event()

    async def script(call: Call) -> None:
        await call.begin_stream()
        await call.chunk(b'data: {"content":"one"}\n\n')
        await may_end.wait()
        await call.chunk(b'data: {"content":"two","stop":true}\n\n')
        await call.end()

    await proxy.fake(script)
    files = write(tmp_path, authority.issue_cert("127.0.0.1"))
    await proxy.open(tls=TlsSettings(**files))
    context = trusting(authority)
    async with connected(proxy, context) as (reader, writer):
        before = serial(writer)
        writer.write(STREAM)
        await reader.readuntil(b"one")
        write(tmp_path, authority.issue_cert("127.0.0.1"))
        assert await shown(proxy, context) != before
        may_end.set()
        assert await reader.readuntil(b"\r\n0\r\n\r\n")
        assert serial(writer) == before


async def test_a_broken_new_file_keeps_the_old_one_with_one_warning(
    proxy: ProxyHarness, authority: trustme.CA, tmp_path: Path
) -> None:
    files = write(tmp_path, authority.issue_cert("127.0.0.1"))
    await proxy.open(tls=TlsSettings(**files))
    context = trusting(authority)
    before = await shown(proxy, context)
    files["cert"].write_text("nothing")
    for _ in range(4):
        assert await shown(proxy, context) == before
    (warning,) = proxy.events("settings.rejected")
    assert "the TLS certificate is unchanged" in warning["reason"]
    assert "has no certificate" in warning["reason"]
    write(tmp_path, authority.issue_cert("127.0.0.1"))
    assert await shown(proxy, context) != before
