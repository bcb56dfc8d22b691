"""What a client is sent: an answer, an error in its client library's shape, or an honest break.

A client that waits for a stream may be sent comments before there is anything to say; they bind us
to nothing but the status, and an error that comes then is the last event of a complete body.

A break behind the first byte of an instance's own answer cannot be repaired. A stream of events
gets one more event that says what went wrong, and then the connection ends without the mark of a
complete body; any other body ends in an aborted connection. Never a clean end, never a false
`[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.errors import ProxyError, anthropic_type, openai_type
from proxy.headers import EVENT_STREAM, for_client, is_event_stream
from proxy.router.lease import Lease

# A client that stopped reading does not get its last event either.
_FAREWELL_TIMEOUT_S: Final = 0.5
_ANTHROPIC_PATH: Final = "/v1/messages"
_EVENT_END: Final = b"\n\n"


class _Response(web.StreamResponse):
    """A response whose header goes out with the first bytes behind it, in one packet."""

    # As aiohttp has it for its own whole responses; a public name for it there is none.
    _send_headers_immediately = False


class ClientResponse:
    """The response to one request, written piece by piece.

    Attributes:
        record: What is remembered of the request.
        is_committed: Whether anything of an instance's own answer was sent; no other instance can
            then take over.
        extra_headers: Header fields that every answer of an instance gets besides its own.
        stop_keepalive: Has whoever keeps the client awake say no more; awaited before anything else
            is said.
    """

    def __init__(self, request: web.Request, record: AccessRecord) -> None:
        self._request = request
        self.record = record
        self._last_chunk = _EVENT_END
        self._response: web.StreamResponse | None = None
        self._is_chunked = False
        self.is_committed = False
        self.extra_headers: Mapping[str, str] = {}
        self.stop_keepalive: Callable[[], Awaitable[None]] | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; an error can then no longer become a status."""
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """What aiohttp is given back; an empty one where nothing has begun."""
        return _Response() if self._response is None else self._response

    def leased(self, lease: Lease) -> None:
        """Note that an instance has the request now."""
        self.record.set_instance(lease.upstream.name, lease.queued_s, lease.expected_cached)
        self.extra_headers = _traces(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Set the status and the header of an instance's answer; not again where a wait did.

        They go out with the first bytes of the body, or with its end.

        Raises:
            ConnectionError: Nobody is there to take it.
        """
        await self._stop_keepalive()
        self.is_committed = True
        if not self.has_begun:
            headers.update(self.extra_headers)
            await self._prepare(status, headers)

    async def send_keepalive(self, comment: bytes) -> None:
        """Send what keeps a client that waits for a stream awake; begins the answer.

        Raises:
            ConnectionError: Nobody is there to take it.
        """
        if not self.has_begun:
            await self._prepare(200, for_client(CIMultiDict({"Content-Type": EVENT_STREAM})))
        await self.response.write(comment)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Answer with an instance's own error: as it is, or as an event where a wait began.

        Raises:
            ConnectionError: Nobody is there to take it.
        """
        await self._stop_keepalive()
        if self.has_begun:
            self.record.status = status
            body = _event(self._request.path, body)
        await self.begin(status, headers)
        await self.finish(body)

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; returns when the client has room for more.

        Raises:
            ConnectionError: Nobody is there to take them.
        """
        self._last_chunk = chunk
        self.record.count(chunk)
        await self.response.write(chunk)

    def put(self, chunk: bytes) -> bool:
        """Send bytes of a stream that has begun, at once; return False, with nothing sent, if not.

        They have to wait where the kernel has yet to take what was sent before, and nobody takes
        them where the client has left: `write` waits, and tells.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        self._last_chunk = chunk
        self.record.count(chunk)
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk)
        return True

    async def finish(self, last: bytes = b"") -> None:
        """Send the last bytes of the body, and mark it as complete.

        Raises:
            ConnectionError: Nobody is there to see it.
        """
        self.record.count(last)
        await self.response.write_eof(last)

    async def abort(self, error: ProxyError) -> None:
        """End a body that cannot be completed so that no client takes it for complete."""
        transport = self._request.transport
        if transport is None:
            return
        if not self.is_committed:
            await self._end_with(error)
            return
        # An event behind half an event would be read as part of it.
        if is_event_stream(self.response.headers) and self._last_chunk.endswith(_EVENT_END):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(_error_event(self._request.path, error))
                    transport.close()
                    return
        transport.abort()

    async def _stop_keepalive(self) -> None:
        if self.stop_keepalive is not None:
            await self.stop_keepalive()

    async def _prepare(self, status: int, headers: CIMultiDict[str]) -> None:
        self._response = _Response(status=status, headers=headers)
        self.record.status = status
        await self._response.prepare(self._request)
        self._is_chunked = "Transfer-Encoding" in self._response.headers

    async def _end_with(self, error: ProxyError) -> None:
        """End a stream in which nothing was said yet."""
        with contextlib.suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                await self.response.write(_error_event(self._request.path, error))
                await self.response.write_eof()


def _traces(lease: Lease) -> dict[str, str]:
    """Return what a client is told of how its request fared."""
    traces = {"X-Corral-Instance": lease.upstream.name}
    if lease.position:
        traces["X-Corral-Queue-Position"] = str(lease.position)
        traces["X-Corral-Queue-Ms"] = str(round(lease.queued_s * 1000))
    return traces


def error_response(path: str, error: ProxyError) -> web.Response:
    """Return an error as the client libraries of this path understand it."""
    response = web.Response(
        status=error.status,
        headers=error.headers(),
        body=orjson.dumps(error_body(path, error)),
        content_type="application/json",
    )
    if error.ends_connection:
        response.force_close()
    return response


def _error_event(path: str, error: ProxyError) -> bytes:
    return _event(path, orjson.dumps(error_body(path, error)))


def _event(path: str, body: bytes) -> bytes:
    name = b"event: error\n" if path.startswith(_ANTHROPIC_PATH) else b""
    return name + b"data: " + body + _EVENT_END


def error_body(path: str, error: ProxyError) -> dict[str, object]:
    """Return what an error says, in the shape that the clients of this path understand."""
    if path.startswith(_ANTHROPIC_PATH):
        details = {"type": anthropic_type(error.status), "message": error.message}
        return {"type": "error", "error": details}
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.status),
            "param": None,
            "code": error.code,
        }
    }
