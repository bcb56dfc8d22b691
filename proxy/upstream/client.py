"""Sends a request to an instance and reads its response as bytes; raises only ProxyError.

Each request has its own connection. llama-server closes a connection after a streamed response
without announcing it, and others after 5 s or 100 requests, so a reused connection may be dead. A
new one over a unix socket costs 0.1 ms, and closing it frees the slot.

Back-pressure: with more than 64 KiB unread, the socket is not read. State changes only in methods
without `await`. The message of a TLS error with a node names the setting.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Self, cast

from multidict import CIMultiDict

from proxy.errors import (
    BadRequest,
    NodeUnconnected,
    ProxyError,
    UpstreamConnectFailed,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamUnconnected,
)
from proxy.settings import ProxySettings
from proxy.upstream.http1 import NO_HEADERS, InvalidResponse, Response
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
_NON_BLOCKING: Final = int(getattr(socket, "SOCK_NONBLOCK", 0))  # some systems lack it
_STREAM: Final = socket.SOCK_STREAM | _NON_BLOCKING

# Consumes bytes of a body; False if it cannot now, and then it has done nothing. It gets them again
# as a chunk with its framing, or nothing if they are not one chunk.
OnChunk = Callable[[bytes, bytes], bool]


@dataclass(slots=True)
class UpstreamRequest:
    """A request: `headers` without key, Host and framing; `path` quoted; `query` without `?`."""

    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    request_id: str = ""  # For the engine's log.


class UpstreamResponse(asyncio.Protocol):
    """Sends a request on a new connection, and reads the response; used by one task.

    The context manager is entered when the response header has arrived. It and `read` raise:

        UpstreamUnconnected: It accepted no connection.
        UpstreamConnectFailed: It closed the connection without a response.
        UpstreamTimeout: It sent nothing for `upstream_read_timeout_s`.
        UpstreamFailed: Its response is not HTTP, it broke off, or it rejected our key.
        BadRequest: The header of the request contains a line break or a NUL.
    """

    def __init__(
        self, upstream: Upstream, upstream_request: UpstreamRequest, settings: ProxySettings
    ) -> None:
        self.status = 0  # 0 before the header has arrived.
        self.headers = NO_HEADERS
        self.is_read = False  # Whether the body was read to its end.
        self._upstream = upstream
        self._unsent: tuple[bytes, bytes | memoryview]
        self._unsent = _head(upstream, upstream_request), upstream_request.body
        self._settings = settings
        self._parser = Response(upstream_request.method)
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._take: OnChunk | None = None
        self._is_paused = False
        self._failure: ProxyError | None = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        upstream = self._upstream
        try:
            if upstream.socket:
                connection = self._connect(upstream.socket)
                await self._loop.create_unix_connection(lambda: self, sock=connection)
            else:
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await _connect_tcp(self._loop, self, upstream)
        except OSError as error:
            reason = tls_refusal(error) or f"takes no connection: {error}"
            if isinstance(error, TimeoutError):
                reason = "takes no connection in time"
            failure = NodeUnconnected if upstream.node else UpstreamUnconnected
            raise failure(upstream.name, reason) from error
        try:
            while not self.status:
                await self._change()
        except BaseException:
            self.close()
            raise
        if self.status == 401:
            self.close()
            # A 401 would tell the client that its own key is wrong.
            reason = "see its key_file" if upstream.node else "is something else on its port?"
            raise UpstreamFailed(f"{upstream.name} does not know our key; {reason}")
        return self

    def _connect(self, path: str) -> socket.socket:
        """Connect to a unix socket, at once or not at all, and send the request.

        The engine begins with it while the loop takes over the connection. Raises OSError.
        """
        # uvloop closes the descriptor of any other class, such as its base, a second time, when it
        # may belong to another thread. Source: uvloop, handles/handle.pyx.
        connection = socket.socket(socket.AF_UNIX, _STREAM)
        try:
            if not _NON_BLOCKING:
                connection.settimeout(0)
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        head, body = self._unsent
        try:
            sent = connection.sendmsg((head, body))
        except OSError:
            return connection  # the transport sends it then, or reports the error
        self._unsent = head[sent:], memoryview(body)[max(0, sent - len(head)) :]
        return connection

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def read(self, take: OnChunk | None = None) -> bytes:
        """Return the bytes of the body that have arrived; empty at its end.

        Args:
            take: Gets bytes that arrive meanwhile, except the last ones of the body, in the loop
                step in which they arrive; only bytes that it does not consume are returned.
        """
        self._take = take
        try:
            while not self._held:
                if self._parser.is_over:
                    self.is_read = True
                    return b""
                await self._change()
        finally:
            self._take = None
        held = self._held
        body = held[0] if len(held) == 1 else b"".join(held)
        self._held, self._held_bytes = [], 0
        self.is_read = self._parser.is_over
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    def stop_taking(self) -> None:
        """Give the `take` of the current `read` no further bytes."""
        self._take = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if unsent := [part for part in self._unsent if part]:
            self._transport.writelines(unsent)
        self._unsent = b"", b""
        silence_s = self._settings.upstream_read_timeout_s
        self._timer = self._loop.call_later(silence_s, self._check_silence)

    def data_received(self, data: bytes) -> None:
        parser, take = self._parser, None if self._held else self._take
        body, chunk = take and parser.whole_chunk(data), data
        if not body:
            body, chunk = self._parse(data), b""
        if take and body and not parser.is_over and take(body, chunk):
            self._waiting_since_s = self._loop.time()
        else:
            self._hold(body)

    def _parse(self, data: bytes) -> bytes:
        parser = self._parser
        if self._failure is None:
            try:
                return parser.feed(data)
            except InvalidResponse as error:
                self.status = parser.status  # the header may be valid
                sentence = f"{self._upstream.name} sent an invalid HTTP response: {error}"
                self._fail(UpstreamFailed(sentence), error)
        return b""

    def _hold(self, body: bytes) -> None:
        parser = self._parser
        if parser.is_over:
            self.is_read = not body and not self._held
            self.close()
        if not self.status:
            self.status, self.headers = parser.status, parser.headers
        if body:
            self._held.append(body)
            self._held_bytes += len(body)
            if self._held_bytes > _HELD_MAX_BYTES and not self._is_paused and self._transport:
                self._is_paused = True
                self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.close()
        if self._failure is None and not (self._parser.is_over or self._parser.end()):
            refusal = tls_refusal(exc) or "closed the connection without an answer"
            self._fail(UpstreamConnectFailed(self._upstream.name, refusal), exc)
        self._wake()

    def _fail(self, failure: ProxyError, cause: Exception | None = None) -> None:
        """Fail with this error, or with that of a response that breaks off after its header."""
        if self.status and not isinstance(failure, UpstreamTimeout):
            failure = UpstreamFailed(f"{self._upstream.name} broke off its answer")
        failure.__cause__ = cause
        self._failure, self._take = self._failure or failure, None
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        """Return a future that ends with the next bytes, or with the connection."""
        if self._failure is not None:
            raise self._failure
        self._waiting_since_s = self._loop.time()
        self._waiter = self._loop.create_future()
        return self._waiter

    def _check_silence(self) -> None:
        # The timer is moved when it expires, not restarted for each chunk.
        now_s, silence_s = self._loop.time(), self._settings.upstream_read_timeout_s
        is_waiting = self._waiter is not None and not self._waiter.done()
        since_s = self._waiting_since_s if is_waiting else now_s
        if now_s - since_s >= silence_s:
            reason = (
                "stopped sending its answer" if self.status else "did not begin to answer in time"
            )
            self._fail(UpstreamTimeout(f"{self._upstream.name} {reason}"))
        else:
            self._timer = self._loop.call_at(since_s + silence_s, self._check_silence)


# A vanished machine is detected after this silence and three probes.
_ALIVE_S: Final = 15
_PROBE_INTERVAL_S: Final = 5


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
        async with limit, UpstreamResponse(upstream, upstream_request, settings) as response:
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


async def _connect_tcp(
    loop: asyncio.AbstractEventLoop, response: UpstreamResponse, upstream: Upstream
) -> None:
    node = upstream.node
    tls = (node.tls or system_tls)() if node and node.is_tls else None
    host, port = upstream.host, upstream.port
    name = node.hostname if node and node.hostname and tls else None
    transport, _ = await loop.create_connection(
        lambda: response, host, port, ssl=tls, server_hostname=name
    )
    if node:
        _enable_keepalive(transport.get_extra_info("socket"))


def _enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect a dead machine: a healthy engine may be silent for minutes.

    Source: Linux, tcp(7).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence_ms = 1000 * (_ALIVE_S + 3 * _PROBE_INTERVAL_S)
    options = {"TCP_KEEPIDLE": _ALIVE_S, "TCP_KEEPINTVL": _PROBE_INTERVAL_S, "TCP_KEEPCNT": 3}
    for name, value in {**options, "TCP_USER_TIMEOUT": silence_ms}.items():
        if option := getattr(socket, name, None):  # some systems lack some of them
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


@cache
def system_tls() -> ssl.SSLContext:
    """Return a context that trusts the system's CAs; to read them takes 30 ms."""
    return ssl.create_default_context()


def _head(upstream: Upstream, upstream_request: UpstreamRequest) -> bytes:
    path = upstream_request.path
    if upstream.node:
        path = upstream.node.prefix + path
    if upstream_request.query:
        path = f"{path}?{upstream_request.query}"
    lines = [
        f"{upstream_request.method} {path} HTTP/1.1",
        # First: the web UI of an engine is compressed, and the first Accept-Encoding counts.
        *[f"{name}: {value}" for name, value in upstream_request.headers.items()],
        *upstream.own_fields,
    ]
    if upstream_request.request_id:
        lines.append(f"X-Request-Id: {upstream_request.request_id}")
    if upstream_request.body or upstream_request.method == "POST":
        lines.append(f"Content-Length: {len(upstream_request.body)}")
    text = "\n".join(lines)
    # An additional line would be an unchecked field or request.
    if text.count("\n") != len(lines) - 1 or "\r" in text or "\0" in text:
        raise BadRequest("the header of the request holds a line break or a NUL")
    # Bytes that are not UTF-8 are forwarded unchanged.
    return f"{text}\n\n".replace("\n", "\r\n").encode("utf-8", "surrogateescape")
