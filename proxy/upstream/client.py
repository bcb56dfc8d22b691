"""Sends a request to an instance and reads its response, as bytes; raises only ProxyError.

Each request has its own connection. llama-server closes a connection after a streamed response
without announcing it, and others after 5 s or 100 requests, so a kept one may be dead; a new one
over a unix socket costs 0.1 ms, and closing it frees the slot.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cache
from http import HTTPStatus
from types import TracebackType
from typing import Final

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
from proxy.upstream.connection import ConnectionBroken, OnChunk, ReadTimeout, UpstreamConnection
from proxy.upstream.tls_refusal import tls_refusal
from proxy.upstream.upstream import Upstream

# A machine that vanished is detected after so much silence and three probes.
_ALIVE_S: Final = 15
_PROBE_INTERVAL_S: Final = 5


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """`headers` are without key, Host and framing; `path` is quoted, `query` without `?`."""

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
        """Whether the body was read to its end."""
        return self._connection.is_read

    async def read(self, take: OnChunk | None = None) -> bytes:
        """The next bytes of the body; empty at its end. See `UpstreamConnection.read`.

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
    """The whole response, within `limit_s` seconds.

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
    """A generator in its place costs ten times as much."""

    def __init__(
        self, upstream: Upstream, upstream_request: UpstreamRequest, settings: ProxySettings
    ) -> None:
        self._upstream = upstream
        self._upstream_request = upstream_request
        self._settings = settings

    async def __aenter__(self) -> UpstreamResponse:
        upstream, upstream_request = self._upstream, self._upstream_request
        self._connection = await _connected(upstream, upstream_request, self._settings)
        try:
            await _begun(self._connection, upstream)
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


async def _connected(
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
    except TimeoutError as error:
        raise _unconnected(upstream, "takes no connection in time") from error
    except OSError as error:
        reason = tls_refusal(error) or f"takes no connection: {error}"
        raise _unconnected(upstream, reason) from error
    return connection


def _unconnected(upstream: Upstream, reason: str) -> UpstreamUnconnected:
    failure = NodeUnconnected if upstream.node else UpstreamUnconnected
    return failure(upstream.name, reason)


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
    """The kernel detects a dead machine; a healthy engine may be silent for minutes.

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


async def _begun(connection: UpstreamConnection, upstream: Upstream) -> None:
    name = upstream.name
    try:
        await connection.response_started()
    except ReadTimeout as error:
        raise UpstreamTimeout(f"{name} did not begin to answer in time") from error
    except ConnectionBroken as error:
        if error.is_malformed:
            raise UpstreamFailed(f"{name} gave no answer that is HTTP: {error}") from error
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
