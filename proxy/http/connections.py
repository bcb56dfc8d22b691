"""Client connections: their limit, TLS handshakes, header timeout and size, malformed HTTP.

Each connection uses a file descriptor, and each request in flight uses one more for its instance.
Without descriptors the daemon cannot start, write or accept anything. Above the limit, a connection
without an accepted request is closed first, so that silent connections cannot lock out clients with
a key; a connection with a request in flight is never closed.

asyncio and uvloop notify a protocol of a TLS connection only after the handshake. So connections
are accepted without TLS and upgraded by `Handshakes`: they count towards the limit from the start.

aiohttp limits the time of a connection without a request, but not of an incomplete header.
Malformed HTTP never becomes a request, so `Connection` answers it with an error in JSON; it is not
logged, because a port scan could fill the log.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Hashable
from contextlib import suppress
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Generic, Protocol, TypeVar, cast, runtime_checkable

from aiohttp import StreamReader, http_exceptions, web
from attrs import define, field

from proxy.common.headers import SERVER
from proxy.errors import (
    BadRequest,
    ExpectationFailed,
    HeaderTooLarge,
    InternalError,
    ProxyError,
    RequestTimeout,
    Unavailable,
)
from proxy.http.api_formats import error_response
from proxy.observe.record import new_request_id

_resource: Final = import_module("resource") if find_spec("resource") else None  # not on Windows
# Used on a system without a limit of descriptors.
_NO_LIMIT: Final = 2**20
# More than the requests that fit into the queues.
_DEFAULT_MAX: Final = 1024
_LEAST: Final = 8
# For logs, the control socket, and each instance's socket, pipes and log.
_RESERVE_LEAST: Final = 128
# A quarter of the limit is for connections that have yet to send their first request.
_NEW_SHARE: Final = 4

T = TypeVar("T")


@runtime_checkable
class Closable(Protocol):
    """A connection that can be closed for another one."""

    def give_way(self) -> None:
        """Close it, so that its descriptor is free at once."""


class Connections(Generic[T]):
    """The open connections, by state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_closing = False  # whether each response is the last of its connection
        self.requests = 0  # accepted since the start
        self._new: dict[T, None] = {}  # without an accepted request; oldest first
        self._idle: dict[T, None] = {}  # between two requests; idle longest first
        self._busy: set[T] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._busy)

    def add(self, connection: T) -> T | None:
        """Add a connection; return the one to close for it, if any.

        Raises Unavailable: every connection has a request in flight.
        """
        outgoing = self._outgoing() if len(self) >= self.limit else None
        if outgoing is not None:
            self.remove(outgoing)
        self._new[connection] = None
        return outgoing

    def begin_closing(self) -> None:
        self.is_closing = True

    def is_busy(self, connection: T) -> bool:
        return connection in self._busy

    def begin(self, connection: T) -> None:
        """Note that a request was accepted; ignored for a removed connection."""
        self.requests += 1
        for waiting in (self._idle, self._new):
            if connection in waiting:
                del waiting[connection]
                self._busy.add(connection)
                return

    def end(self, connection: T) -> None:
        """Note that its request ended; ignored without a request."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def remove(self, connection: T) -> None:
        """Note that a connection is closed; idempotent."""
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        self._busy.discard(connection)

    def _outgoing(self) -> T:
        first, second = self._new, self._idle
        if len(self._new) <= self.limit // _NEW_SHARE:
            first, second = second, first
        for connection in (*list(first)[:1], *list(second)[:1]):
            return connection
        raise Unavailable(
            f"all {self.limit} connections have a request in flight; retry later, or raise "
            "max_connections under [proxy] and the limit of open files"
        )


def limit_of(wanted: int | None, descriptors: int) -> int:
    """Return the maximum of connections: the setting, bounded by the limit of open files."""
    reserve = max(_RESERVE_LEAST, descriptors // 4)
    # Each request in flight needs a second descriptor.
    room = max(_LEAST, (descriptors - reserve) // 2)
    return min(wanted or _DEFAULT_MAX, room)


def descriptors_max() -> int:
    if _resource is None:
        return _NO_LIMIT
    soft, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == _resource.RLIM_INFINITY else int(soft)


@define(eq=False, slots=False)
class Handshakes:
    """Upgrades accepted connections to TLS.

    `accept` is the factory for `create_server`; `make` returns the protocol for a connection whose
    handshake is finished.
    """

    _connections: Connections[Hashable]
    _context: ssl.SSLContext
    _make: Callable[[], asyncio.Protocol]
    _timeout_s: float
    _shutdown_timeout_s: float
    _running: dict[asyncio.Task[None], _Accepted] = field(factory=dict, init=False)
    _is_closed: bool = field(default=False, init=False)

    def accept(self) -> asyncio.Protocol:
        return _Accepted(self)

    def begin(self, accepted: _Accepted) -> None:
        """Count the connection and start its handshake, or close it without an answer."""
        if self._is_closed:
            accepted.give_way()
            return
        try:
            outgoing = self._connections.add(accepted)
        except ProxyError:  # a client reads no HTTP before the handshake
            accepted.give_way()
            return
        if isinstance(outgoing, Closable):
            outgoing.give_way()
        task = asyncio.get_running_loop().create_task(self._run(accepted))
        self._running[task] = accepted
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Abort all handshakes, including those of connections that are accepted later."""
        self._is_closed = True
        for accepted in self._running.values():
            accepted.give_way()
        if self._running:
            await asyncio.wait(tuple(self._running))

    async def _run(self, accepted: _Accepted) -> None:
        early = _Early()
        transport = None
        try:
            with suppress(OSError):  # the client's refusal or silence
                transport = await self._upgrade(accepted, early)
        finally:
            self._connections.remove(accepted)
            if transport is None or transport.is_closing():
                accepted.give_way()
        if transport is not None and not transport.is_closing():
            early.hand_over(transport, self._make())

    async def _upgrade(self, accepted: _Accepted, early: _Early) -> asyncio.Transport | None:
        """Return None if the connection is closed; `start_tls` does not raise for that."""
        if accepted.transport.is_closing():
            return None
        loop = asyncio.get_running_loop()
        loop.call_soon(accepted.pass_on)  # before `start_tls` begins the handshake
        return await loop.start_tls(
            accepted.transport,
            early,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._timeout_s,
            ssl_shutdown_timeout=self._shutdown_timeout_s,
        )


class _Accepted(asyncio.Protocol):
    """The protocol of a connection before `start_tls` replaces it."""

    transport: asyncio.Transport

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._handshakes.begin(self)

    def data_received(self, data: bytes) -> None:
        """Keep bytes that uvloop reads before its next step; `start_tls` resumes reading."""
        self._data += data
        self.transport.pause_reading()

    def pass_on(self) -> None:
        """Pass the kept bytes to the TLS protocol, which buffers them for its handshake."""
        if self._data and (current := self.transport.get_protocol()) is not self:
            protocol = cast("asyncio.BufferedProtocol", current)
            memoryview(protocol.get_buffer(len(self._data)))[: len(self._data)] = self._data
            protocol.buffer_updated(len(self._data))

    def give_way(self) -> None:
        self.transport.abort()


class _Early(asyncio.Protocol):
    """Buffers data that arrives before `start_tls` returns (at most one read)."""

    def __init__(self) -> None:
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(self._data)


_PATH: Final = "/"  # the path is unknown, so errors have OpenAI's format
# A header may exceed its limit by one slice.
_SLICE_BYTES: Final = 8 * 1024
# Pipelined requests that are read while one is in flight.
_QUEUE_MAX: Final = 2
_NO_PROGRESS: Final = (0, 0, True)


class Connection(web.RequestHandler):
    """An HTTP connection with limits of time and size for the header.

    `head_max_bytes` limits the bytes that complete neither a request nor body data.
    """

    __slots__ = (
        "_body",
        "_connections",
        "_head_max_bytes",
        "_head_timeout_s",
        "_head_timer",
        "_is_between",
        "_plain_left",
        "_rest",
        "_unused_bytes",
    )

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        connections: Connections[Hashable],
        header_timeout_s: float,
        head_max_bytes: int,
        **options: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._max_msg_queue_size, self._msg_queue_resume_size = _QUEUE_MAX, _QUEUE_MAX - 1
        self._connections = connections
        self._head_timeout_s = header_timeout_s
        self._head_max_bytes = head_max_bytes
        self._is_between = True  # whether the next bytes belong to a header
        self._head_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the last request, until its end
        self._plain_left = 0  # missing bytes of a body with Content-Length
        self._rest = b""  # bytes that are not parsed yet
        self._unused_bytes = 0  # bytes since the last complete request or body data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        try:
            outgoing = self._connections.add(self)
        except ProxyError as error:
            self.force_close()
            cast("asyncio.Transport", transport).write(_bare(error))
            transport.close()
            return
        if isinstance(outgoing, Closable):
            outgoing.give_way()
        super().connection_made(transport)

    def give_way(self) -> None:
        transport = self.transport
        self.force_close()
        if transport is not None and transport.get_extra_info("ssl_object") is not None:
            transport.abort()  # a close would wait seconds for the client to end TLS

    def data_received(self, data: bytes) -> None:
        """Parse bytes, outside of bodies in slices, so that the size of a header can be limited.

        Bytes that the parser cannot take yet wait here while the transport does not read.
        """
        data, self._rest = self._rest + data, b""
        while not (self._force_close or self._close):
            size = max(_SLICE_BYTES, self._plain_left)
            self._take(data[:size])
            data = data[size:]
            if not data:
                return
            if self._reading_paused or len(self._messages) >= self._max_msg_queue_size:
                self._rest = data
                return

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 (aiohttp's)
        # aiohttp calls this for each piece of a body.
        if self._reading_paused or self._rest:
            super().resume_reading(resume_parser)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Finish a response; then a header follows, unless a pipelined request waits."""
        finished = await super().finish_response(request, resp, start_time)
        self._connections.end(self)
        self._is_between = not self._messages
        if self._unused_bytes:
            self._start_timer()
        if self._upgraded or resp.headers.get("Connection") == "close":
            self.close()  # no upgrade is supported; a draining server announced the close
        return finished

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._connections.remove(self)
        self._body, self._rest = None, b""
        super().connection_lost(exc)

    def _take(self, part: bytes) -> None:
        requests, before = self._request_count, _NO_PROGRESS
        if self._body is not None:
            before = self._progress()
        super().data_received(part)
        self._plain_left = max(0, self._plain_left - len(part))
        if self._request_count != requests:
            self._note_request(*self._messages[-1])
        elif self._progress() != before:
            self._unused_bytes = 0
        elif part:
            self._unused_bytes += len(part)
            if self._unused_bytes > self._head_max_bytes:
                self._stop_timer()
                self._refuse(
                    HeaderTooLarge(f"the header is larger than {self._head_max_bytes} bytes")
                )
            else:
                self._start_timer()
        if self._body is not None and self._body.is_eof():
            self._body, self._plain_left = None, 0

    def _note_request(self, message: object, body: StreamReader) -> None:
        """Note that a header is complete; its body follows, then another header."""
        self._body = None if body.is_eof() else body
        self._is_between, self._unused_bytes = False, 0
        if self._head_timer is not None:
            self._stop_timer()
        if self._body is not None:
            fields = getattr(message, "headers", {})  # an error has none
            plain, compressed, _ = self._progress()
            self._plain_left = int(fields.get("Content-Length", 0)) - (compressed or plain)

    def _progress(self) -> tuple[int, int, bool]:
        """Return the arriving body's decoded bytes, received bytes, and whether it has ended."""
        body = self._body
        if body is None:
            return _NO_PROGRESS
        return body.total_bytes, body.total_compressed_bytes or 0, body.is_eof()

    def _refuse(self, error: ProxyError) -> None:
        """Answer unless a response is being sent, and read no more bytes."""
        if self._body is not None:
            self._body.set_exception(web.RequestPayloadError(f"0, message:\n  {error.message}"))
        elif self._is_between and self.transport is not None:
            self.transport.write(_bare(error))
            self.force_close()
            return
        self.close()  # after the response in progress

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer malformed requests and unhandled errors in JSON.

        Raises ConnectionError: part of a response was sent.
        """
        if isinstance(exc, http_exceptions.HttpProcessingError):
            response = error_response(_PATH, parse_failure(exc))
        elif isinstance(exc, UnicodeEncodeError) and "Expect" in request.headers:
            # aiohttp fails to encode its own error for an Expect that is not text.
            response = error_response(request.path, ExpectationFailed())
        else:
            super().handle_error(request, status, exc, message)  # logs it
            response = error_response(request.path, InternalError())
        response.headers.update({"Server": SERVER, "X-Request-Id": new_request_id()})
        response.force_close()
        return response

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self._refuse(
                RequestTimeout(f"the header did not arrive within {self._head_timeout_s:g} s")
            )

    def _start_timer(self) -> None:
        if self._is_between and self._body is None and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def parse_failure(error: http_exceptions.HttpProcessingError) -> ProxyError:
    # After the first empty line, the parser quotes the bytes.
    reason = " ".join(error.message.partition("\n\n")[0].split()).rstrip(":")
    if isinstance(error, http_exceptions.LineTooLong):
        return HeaderTooLarge("the request line or a header field is too long")
    if "too many headers" in reason.lower():
        return HeaderTooLarge("the request has too many header fields")
    return BadRequest(f"malformed HTTP request: {ascii(reason[:120])[1:-1]}")


def _bare(error: ProxyError) -> bytes:
    body = (error_response(_PATH, error).text or "").encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in error.headers().items()),
        f"Server: {SERVER}",
        f"X-Request-Id: {new_request_id()}",
    )
    return "\r\n".join((*head, "", "")).encode() + body
