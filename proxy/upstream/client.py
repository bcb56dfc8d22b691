"""Sends a request to an instance and reads its response as bytes; raises only ProxyError.

Each request has its own connection. llama-server closes a connection after a streamed response
without announcing it, and others after 5 s or 100 requests, so a reused connection may be dead. A
new one over a unix socket costs 0.1 ms, and closing it frees the slot.

Back-pressure: with more than 64 KiB unread, the socket is not read. State changes only in methods
without `await`. The message of a TLS error with a node says what to configure.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from types import TracebackType
from typing import Final, cast

from multidict import CIMultiDict, CIMultiDictProxy

from proxy.errors import (
    BadRequest,
    NodeUnconnected,
    UpstreamConnectFailed,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnconnected,
)
from proxy.settings import ProxySettings
from proxy.upstream.http1 import InvalidResponse, Response
from proxy.upstream.upstream import Upstream

# X509_V_ERR_*: self-signed, or unknown issuer. Source: OpenSSL, x509_vfy.h.
_UNKNOWN_ISSUER: Final = frozenset({2, 18, 19, 20, 21})

# By the reason of the error, the alert of the other side. Source: OpenSSL, sslerr.h.
_REASONS: Final = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "demands a client certificate; set its cert and key",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "refuses TLS with us; does it demand a client certificate "
    "(cert and key of the node)?",
    "TLSV1_ALERT_UNKNOWN_CA": "does not accept our client certificate: it does not know its CA",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "does not accept our client certificate: it has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "does not accept our client certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "does not accept our client certificate: it is not for "
    "clients",
    "TLSV1_ALERT_PROTOCOL_VERSION": "offers no TLS from version 1.2 on",
    "UNSUPPORTED_PROTOCOL": "offers no TLS from version 1.2 on",
    "WRONG_VERSION_NUMBER": "does not speak TLS; its url may be http://",
}


def tls_refusal(error: Exception | None) -> str | None:
    """Return why a node ended TLS, as a predicate; None if it is not a TLS error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "; set its ca_file" if error.verify_code in _UNKNOWN_ISSUER else ""
        return f"has a certificate that cannot be verified: {error.verify_message}{hint}"
    if isinstance(error, ssl.SSLError):
        return _REASONS.get(error.reason or "", f"fails in TLS: {error}")
    return None


_HELD_MAX_BYTES: Final = 64 * 1024
# Up to this size, one packet costs less than two; above, copying the body costs more.
_JOINED_MAX_BYTES: Final = 64 * 1024

# Consumes bytes of a body; False if it cannot now, and then it has done nothing.
OnChunk = Callable[[bytes], bool]


class ConnectionBroken(Exception):
    """The connection ended early, or (`is_malformed`) its bytes are not an HTTP response.

    `tls_refusal` says why the other side ended TLS, if it did.
    """

    def __init__(
        self, reason: str, *, is_malformed: bool = False, tls_refusal: str | None = None
    ) -> None:
        super().__init__(reason)
        self.is_malformed = is_malformed
        self.tls_refusal = tls_refusal


class ReadTimeout(Exception):
    """No bytes arrived in time."""


class UpstreamConnection(asyncio.Protocol):
    """A connection for one request, used by one task.

    It fails if no bytes arrive within `silence_s`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, method: str, silence_s: float) -> None:
        self.response = Response(method)
        self._loop = loop
        self._silence_s = silence_s
        self._request: tuple[bytes, ...] = ()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._take: OnChunk | None = None
        self._is_paused = False
        self._failure: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_read(self) -> bool:
        return self.response.is_over and not self._held

    def send(self, head: bytes, body: bytes) -> None:
        """Send the request in the loop step that connects."""
        self._request = (head + body,) if len(body) <= _JOINED_MAX_BYTES else (head, body)

    async def wait_header(self) -> None:
        """Wait for the response header. Raises ReadTimeout, ConnectionBroken."""
        while not self.response.status:
            await self._change()

    async def read(self, take: OnChunk | None = None) -> bytes:
        """Return the bytes of the body that have arrived; empty at its end.

        Args:
            take: Gets bytes that arrive meanwhile, except the last ones of the body, in the loop
                step in which they arrive; only bytes that it does not consume are returned.

        Raises:
            ReadTimeout: No bytes arrived in time.
            ConnectionBroken: The body will not be complete.
        """
        self._take = take
        try:
            while not self._held:
                if self.response.is_over:
                    return b""
                await self._change()
        finally:
            self._take = None
        held = self._held
        body = held[0] if len(held) == 1 else b"".join(held)
        self._held, self._held_bytes = [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        for part in self._request:
            self._transport.write(part)
        self._request = ()
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)

    def data_received(self, data: bytes) -> None:
        if self._failure is not None:
            return
        try:
            body = self.response.feed(data)
        except InvalidResponse as error:
            self._fail(ConnectionBroken(str(error), is_malformed=True))
            return
        if self.response.is_over:
            self.close()
        elif body and self._take and not self._held and self._take(body):
            self._waiting_since_s = self._loop.time()
            return
        if body:
            self._hold(body)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()
        self._transport = None
        if self._failure is None and not self.response.end():
            reason = str(exc or "the connection was closed")
            self._fail(ConnectionBroken(reason, tls_refusal=tls_refusal(exc)))
        self._wake()

    def _hold(self, body: bytes) -> None:
        self._held.append(body)
        self._held_bytes += len(body)
        if self._held_bytes > _HELD_MAX_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _change(self) -> None:
        """Wait for bytes or the end of the connection."""
        if self._failure is not None:
            raise self._failure
        self._waiting_since_s = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self) -> None:
        # The timer is moved when it expires, not restarted for each chunk.
        now_s = self._loop.time()
        since_s = now_s if self._waiter is None else self._waiting_since_s
        if now_s - since_s >= self._silence_s:
            self._fail(ReadTimeout())
        else:
            self._timer = self._loop.call_at(since_s + self._silence_s, self._check_silence)


# A vanished machine is detected after this silence and three probes.
_ALIVE_S: Final = 15
_PROBE_INTERVAL_S: Final = 5


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """A request: `headers` without key, Host and framing; `path` quoted; `query` without `?`."""

    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes


class UpstreamResponse:
    def __init__(self, connection: UpstreamConnection, upstream: Upstream) -> None:
        self.status: int = connection.response.status
        self.headers: CIMultiDictProxy[str] = connection.response.headers
        self._connection = connection
        self._upstream = upstream

    @property
    def is_read(self) -> bool:
        return self._connection.is_read

    async def read(self, take: OnChunk | None = None) -> bytes:
        """Return the next bytes of the body; empty at its end. See `UpstreamConnection.read`.

        Raises:
            UpstreamTimeout: The instance sent nothing for too long.
            UpstreamFailed: It broke off before the end.
        """
        try:
            return await self._connection.read(take)
        except ReadTimeout as error:
            raise UpstreamTimeout(f"{self._upstream.name} stopped sending its answer") from error
        except ConnectionBroken as error:
            raise UpstreamFailed(f"{self._upstream.name} broke off its answer") from error


def send(
    upstream: Upstream, upstream_request: UpstreamRequest, settings: ProxySettings
) -> AbstractAsyncContextManager[UpstreamResponse]:
    """Send a request; the block is entered when the response header has arrived.

    Raises:
        UpstreamUnconnected: It accepted no connection.
        UpstreamConnectFailed: It closed the connection without a response.
        UpstreamTimeout: It sent nothing for too long.
        UpstreamFailed: Its response is not HTTP, or it rejected our key.
        BadRequest: The header of the request contains a line break or a NUL.
    """
    return _Exchange(upstream, upstream_request, settings)


@dataclass(frozen=True, slots=True)
class FetchedBody:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


async def fetch(
    upstream: Upstream,
    upstream_request: UpstreamRequest,
    settings: ProxySettings,
    limit_s: float,
    max_bytes: int,
) -> FetchedBody:
    """Return the whole response, read within `limit_s` seconds.

    Raises:
        UpstreamTimeout: It was not complete in time.
        UpstreamFailed: The instance failed, or the body is too large.
    """
    body = bytearray()
    limit = asyncio.timeout(limit_s)
    try:
        async with limit, send(upstream, upstream_request, settings) as response:
            while chunk := await response.read():
                body += chunk
                if len(body) > max_bytes:
                    raise UpstreamFailed(f"{upstream_request.path} of {upstream.name} is too large")
    except TimeoutError as error:
        message = f"{upstream.name} did not answer {upstream_request.path} in {limit_s:g} s"
        raise UpstreamTimeout(message) from error
    return FetchedBody(response.status, bytes(body), response.headers)


def get_request(path: str, query: str = "", **fields: str) -> UpstreamRequest:
    return UpstreamRequest("GET", path, query, CIMultiDict(fields), b"")


class _Exchange:
    """A context manager without a generator, which would cost ten times as much."""

    def __init__(
        self, upstream: Upstream, upstream_request: UpstreamRequest, settings: ProxySettings
    ) -> None:
        self._upstream = upstream
        self._upstream_request = upstream_request
        self._settings = settings

    async def __aenter__(self) -> UpstreamResponse:
        upstream, upstream_request = self._upstream, self._upstream_request
        self._connection = await _connect_upstream(upstream, upstream_request, self._settings)
        try:
            await _wait_header(self._connection, upstream)
        except BaseException:
            self._connection.close()
            raise
        return UpstreamResponse(self._connection, upstream)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()


async def _connect_upstream(
    upstream: Upstream, upstream_request: UpstreamRequest, settings: ProxySettings
) -> UpstreamConnection:
    loop = asyncio.get_running_loop()
    connection = UpstreamConnection(loop, upstream_request.method, settings.upstream_read_timeout_s)
    connection.send(_head(upstream, upstream_request), upstream_request.body)
    try:
        if upstream.socket:  # connects at once or not at all, so it needs no timeout
            await loop.create_unix_connection(lambda: connection, upstream.socket)
        else:
            async with asyncio.timeout(settings.connect_timeout_s):
                await _connect_tcp(loop, connection, upstream)
    except OSError as error:
        reason = tls_refusal(error) or f"takes no connection: {error}"
        if isinstance(error, TimeoutError):
            reason = "takes no connection in time"
        failure = NodeUnconnected if upstream.node else UpstreamUnconnected
        raise failure(upstream.name, reason) from error
    return connection


async def _connect_tcp(
    loop: asyncio.AbstractEventLoop, connection: UpstreamConnection, upstream: Upstream
) -> None:
    node = upstream.node
    tls = (node.tls or _tls)() if node and node.is_tls else None
    host, port = upstream.host, upstream.port
    name = node.hostname if node and node.hostname and tls else None
    transport, _ = await loop.create_connection(
        lambda: connection, host, port, ssl=tls, server_hostname=name
    )
    if node:
        _enable_keepalive(transport.get_extra_info("socket"))


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect a dead machine: a healthy engine may be silent for minutes.

    Source: Linux, tcp(7).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _ALIVE_S),
        ("TCP_KEEPINTVL", _PROBE_INTERVAL_S),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * (_ALIVE_S + 3 * _PROBE_INTERVAL_S)),
    ):
        if option := getattr(socket, name, None):  # some systems lack some of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@cache
def _tls() -> ssl.SSLContext:
    # Reading the system's certificates takes 30 ms.
    return ssl.create_default_context()


async def _wait_header(connection: UpstreamConnection, upstream: Upstream) -> None:
    name = upstream.name
    try:
        await connection.wait_header()
    except ReadTimeout as error:
        raise UpstreamTimeout(f"{name} did not begin to answer in time") from error
    except ConnectionBroken as error:
        if error.is_malformed:
            raise UpstreamFailed(f"{name} sent an invalid HTTP response: {error}") from error
        reason = error.tls_refusal or "closed the connection without an answer"
        raise UpstreamConnectFailed(name, reason) from error
    if connection.response.status == HTTPStatus.UNAUTHORIZED:
        # A 401 would tell the client that its own key is wrong.
        reason = "see its key_file" if upstream.node else "is something else on its port?"
        raise UpstreamFailed(f"{name} does not know our key; {reason}")


def _head(upstream: Upstream, upstream_request: UpstreamRequest) -> bytes:
    path = upstream.prefix + upstream_request.path
    target = f"{path}?{upstream_request.query}" if upstream_request.query else path
    lines = [
        f"{upstream_request.method} {target} HTTP/1.1",
        f"Host: {upstream.authority}",
        *[f"{name}: {value}" for name, value in upstream_request.headers.items()],
        "Accept-Encoding: identity",
        "Connection: close",
    ]
    if upstream.api_key:
        lines.append(f"Authorization: Bearer {upstream.api_key}")
    if upstream_request.body or upstream_request.method == "POST":
        lines.append(f"Content-Length: {len(upstream_request.body)}")
    text = "\n".join(lines)
    # An additional line would be an unchecked field or request.
    if text.count("\n") != len(lines) - 1 or "\r" in text or "\0" in text:
        raise BadRequest("the header of the request holds a line break or a NUL")
    # Bytes that are not UTF-8 are forwarded unchanged.
    return f"{text}\n\n".replace("\n", "\r\n").encode("utf-8", "surrogateescape")
