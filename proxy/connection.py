"""One client's connection: how long a header may take, and what is said to what is no HTTP.

aiohttp knows a limit for a connection without a request, and none for a request that does not come
to its end. What its parser refuses never becomes a request: it is answered here, and not logged,
for any port scan could fill a log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import StreamReader, http_exceptions, web

from proxy.connections import Connections
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

_PATH: Final = "/"  # what was asked for is not known: OpenAI's shape
# So much more than the limit may a header have: it comes to light at the end of a slice.
_SLICE_BYTES: Final = 8 * 1024
# Requests that are read while another is under way on the same connection.
_QUEUE_MAX: Final = 2


class Connection(web.RequestHandler):
    """A connection of the server's.

    Args:
        manager: The server that it belongs to.
        loop: The event loop.
        connections: All there are, and how many there may be.
        header_timeout_s: Seconds between the first byte of a header and its last.
        head_max_bytes: Bytes that may come without a request or a part of a body being complete.
        options: What `web.RequestHandler` takes.
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
        self._is_between = True  # whether bytes that come now belong to a header
        self._head_timer: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None  # of the request that was read last, till its end
        self._plain_left = 0  # bytes of a body of known length that are still to come
        self._rest = b""  # not shown to the parser yet
        self._unused_bytes = 0  # since a request or a part of a body was complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a place among all connections, or say that there is none."""
        try:
            outgoing = self._connections.add(self)
        except ProxyError as error:
            self.force_close()
            cast("asyncio.Transport", transport).write(_bare(error))
            transport.close()
            return
        if isinstance(outgoing, Connection):
            outgoing.force_close()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Take bytes in; what is no part of a body is taken in slices, so that it can be bounded.

        What comes while the parser has enough waits here: the transport does not read meanwhile.
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
        """Do nothing where reading is not paused: aiohttp calls this for each piece of a body."""
        if self._reading_paused or self._rest:
            super().resume_reading(resume_parser)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of an answer; what comes next is a header, if nothing waits already."""
        finished = await super().finish_response(request, resp, start_time)
        self._connections.end(self)
        self._is_between = not self._messages
        if self._unused_bytes:
            self._start_timer()
        if self._upgraded:
            self.close()  # nothing is spoken here but HTTP/1.1
        return finished

    def connection_lost(self, exc: BaseException | None) -> None:
        """Clear up."""
        self._stop_timer()
        self._connections.remove(self)
        self._body, self._rest = None, b""
        super().connection_lost(exc)

    def _take(self, part: bytes) -> None:
        """Show bytes to the parser, and see what they came to."""
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
        """Note that a header is complete; what comes now is its body, and then another header."""
        self._body = None if body.is_eof() else body
        self._is_between, self._unused_bytes = False, 0
        self._stop_timer()
        if self._body is not None:
            fields = getattr(message, "headers", {})  # an error has none
            self._plain_left = int(fields.get("Content-Length", 0)) - self._body_bytes()

    def _progress(self) -> tuple[int, int, bool]:
        """Return how much of a body has come; none where no body is on its way.

        That is: bytes after decompression, bytes before it where there is one, and its end.
        """
        body = self._body
        if body is None:
            return 0, 0, True
        return body.total_bytes, body.total_compressed_bytes or 0, body.is_eof()

    def _body_bytes(self) -> int:
        """Return how many bytes of a body have come, as they were sent."""
        plain, compressed, _ = self._progress()
        return compressed or plain

    def _limit_unused(self) -> None:
        """Bound what the parser holds of a header, and how long it may take to come."""
        if self._unused_bytes > self._head_max_bytes:
            self._stop_timer()
            self._refuse(HeaderTooLarge(f"the header is larger than {self._head_max_bytes} bytes"))
        else:
            self._start_timer()

    def _refuse(self, error: ProxyError) -> None:
        """Say what is wrong where nothing else is being said, and take no more bytes."""
        if self._body is not None:
            self._body.set_exception(web.RequestPayloadError(f"0, message:\n  {error.message}"))
        elif self._is_between and self.transport is not None:
            self.transport.write(_bare(error))
            self.force_close()
            return
        self.close()  # once the request that is under way has its answer

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, and what nothing else has answered, in JSON.

        Raises:
            ConnectionError: Something was sent already.
        """
        if isinstance(exc, http_exceptions.HttpProcessingError):
            response = error_response(_PATH, unreadable(exc))
        elif isinstance(exc, UnicodeEncodeError) and "Expect" in request.headers:
            # aiohttp refuses an expectation with its text, also one that is no text.
            response = error_response(request.path, ExpectationFailed())
        else:
            super().handle_error(request, status, exc, message)  # tells the log
            response = error_response(request.path, InternalError())
        response.headers.update({"Server": SERVER, "X-Request-Id": new_request_id()})
        response.force_close()
        return response

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self._refuse(
                RequestTimeout(f"the header did not come within {self._head_timeout_s:g} s")
            )

    def _start_timer(self) -> None:
        """Give a header that has begun its time; what is said of a body has another."""
        if self._is_between and self._body is None and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def unreadable(error: http_exceptions.HttpProcessingError) -> ProxyError:
    """Return what the client is told of bytes that are no request that can be read."""
    # Behind the first empty line the parser shows the bytes themselves.
    what = " ".join(error.message.partition("\n\n")[0].split()).rstrip(":")
    if isinstance(error, http_exceptions.LineTooLong):
        return HeaderTooLarge("the request line or a header field is too long")
    if "too many headers" in what.lower():
        return HeaderTooLarge("the request has too many header fields")
    return BadRequest(f"this is no HTTP request that can be read: {ascii(what[:120])[1:-1]}")


def _bare(error: ProxyError) -> bytes:
    """Return an answer for a connection that has no request to answer."""
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
