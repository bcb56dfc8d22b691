"""One client's connection: how long a header may take, and what is said to what is no HTTP.

aiohttp knows a limit for a connection without a request, and none for a request that does not come
to its end. What its parser refuses never becomes a request: it is answered here, and not logged,
for any port scan could fill a log.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

from aiohttp import http_exceptions, web

from proxy.carry.answer import error_response
from proxy.errors import BadRequest, HeaderTooLarge, ProxyError, TooSlow
from proxy.gate.door import SERVER, new_request_id

_PATH: Final = "/"  # what was asked for is not known: OpenAI's shape


class Connection(web.RequestHandler):
    """A connection of the server's.

    Args:
        manager: The server that it belongs to.
        loop: The event loop.
        head_timeout_s: Seconds between the first byte of a header and its last.
        options: What `web.RequestHandler` takes.
    """

    __slots__ = ("_head_timeout_s", "_head_timer", "_is_between")

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        head_timeout_s: float,
        **options: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **options)
        self._head_timeout_s = head_timeout_s
        self._is_between = True  # whether bytes that come now belong to a header
        self._head_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes in; those that make no request yet must become one in time."""
        requests = self._request_count
        super().data_received(data)
        if self._request_count != requests:
            self._is_between = False
            self._stop_timer()
        elif self._is_between and data and self._head_timer is None:
            self._head_timer = self._loop.call_later(self._head_timeout_s, self._give_up)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send what is left of an answer; what comes next is a header, if nothing waits already."""
        finished = await super().finish_response(request, resp, start_time)
        self._is_between = request.content.is_eof() and not self._messages
        return finished

    def connection_lost(self, exc: BaseException | None) -> None:
        """Clear up."""
        self._stop_timer()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused; any other error is aiohttp's to tell."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = error_response(_PATH, unreadable(exc))
        response.headers.update({"Server": SERVER, "X-Request-Id": new_request_id()})
        response.force_close()
        return response

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            limit_s = self._head_timeout_s
            self.transport.write(_bare(TooSlow(f"the header did not come within {limit_s:g} s")))
            self.force_close()

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
        f"Server: {SERVER}",
        f"X-Request-Id: {new_request_id()}",
    )
    return "\r\n".join((*head, "", "")).encode() + body
