"""Client connection: header timeout and size, and JSON errors for malformed HTTP.

aiohttp limits the time of a connection without a request, but not of an incomplete header.
Malformed HTTP never becomes a request, so it is answered here; it is not logged, because a port
scan could fill the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import StreamReader, http_exceptions, web

from proxy.connections import Closable, Connections
from proxy.errors import (
    BadRequest,
    ExpectationFailed,
    HeaderTooLarge,
    InternalError,
    ProxyError,
    RequestTimeout,
)
from proxy.forward.client_response import error_response
from proxy.headers import SERVER
from proxy.middleware import new_request_id

_PATH: Final = "/"  # unknown: OpenAI's error shape
# A header may exceed its limit by one slice.
_SLICE_BYTES: Final = 8 * 1024
# Pipelined requests that are read behind one in flight.
_QUEUE_MAX: Final = 2


class Connection(web.RequestHandler):
    """`head_max_bytes` bounds the bytes that complete neither a request nor body data."""

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
        self._plain_left = 0  # bytes missing of a body with Content-Length
        self._rest = b""  # not parsed yet
        self._unused_bytes = 0  # since the last complete request or body data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or answer that there are too many."""
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
            transport.abort()  # not after the client has ended TLS, for which it has seconds

    def data_received(self, data: bytes) -> None:
        """Parse bytes: outside of bodies in slices, so that a header can be bounded.

        Bytes that the parser cannot take wait here, while the transport does not read.
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
        """Finish a response; a header follows, unless a pipelined request waits."""
        finished = await super().finish_response(request, resp, start_time)
        self._connections.end(self)
        self._is_between = not self._messages
        if self._unused_bytes:
            self._start_timer()
        if self._upgraded or resp.headers.get("Connection") == "close":
            self.close()  # no other protocol is supported; a draining server has said so
        return finished

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_timer()
        self._connections.remove(self)
        self._body, self._rest = None, b""
        super().connection_lost(exc)

    def _take(self, part: bytes) -> None:
        """Parse bytes, and see what they completed."""
        requests, before = self._request_count, self._progress()
        super().data_received(part)
        self._plain_left = max(0, self._plain_left - len(part))
        if self._request_count != requests:
            self._note_request(*self._messages[-1])
        elif self._progress() != before:
            self._unused_bytes = 0
        elif part:
            self._unused_bytes += len(part)
            self._limit_unused()
        if self._body is not None and self._body.is_eof():
            self._body, self._plain_left = None, 0

    def _note_request(self, message: object, body: StreamReader) -> None:
        """A header is complete; its body follows, then another header."""
        self._body = None if body.is_eof() else body
        self._is_between, self._unused_bytes = False, 0
        self._stop_timer()
        if self._body is not None:
            fields = getattr(message, "headers", {})  # an error has none
            self._plain_left = int(fields.get("Content-Length", 0)) - self._body_bytes()

    def _progress(self) -> tuple[int, int, bool]:
        """Of the body that is arriving: bytes decoded, bytes received, whether it has ended."""
        body = self._body
        if body is None:
            return 0, 0, True
        return body.total_bytes, body.total_compressed_bytes or 0, body.is_eof()

    def _body_bytes(self) -> int:
        plain, compressed, _ = self._progress()
        return compressed or plain

    def _limit_unused(self) -> None:
        """Bound the size and the time of a header."""
        if self._unused_bytes > self._head_max_bytes:
            self._stop_timer()
            self._refuse(HeaderTooLarge(f"the header is larger than {self._head_max_bytes} bytes"))
        else:
            self._start_timer()

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

        Raises:
            ConnectionError: Part of a response was sent.
        """
        if isinstance(exc, http_exceptions.HttpProcessingError):
            response = error_response(_PATH, unreadable(exc))
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
        """Start the timeout of a header; bodies have their own."""
        if self._is_between and self._body is None and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def unreadable(error: http_exceptions.HttpProcessingError) -> ProxyError:
    # After the first empty line, the parser quotes the bytes.
    reason = " ".join(error.message.partition("\n\n")[0].split()).rstrip(":")
    if isinstance(error, http_exceptions.LineTooLong):
        return HeaderTooLarge("the request line or a header field is too long")
    if "too many headers" in reason.lower():
        return HeaderTooLarge("the request has too many header fields")
    return BadRequest(f"malformed HTTP request: {ascii(reason[:120])[1:-1]}")


def _bare(error: ProxyError) -> bytes:
    """A response for a connection without a request."""
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
