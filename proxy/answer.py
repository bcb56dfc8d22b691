"""What a client is sent: an answer, an error in its client library's shape, or an honest break.

A break after the first byte cannot be repaired. A stream of events gets one more event that says
what went wrong, and then the connection ends without the mark of a complete body; any other body
ends in an aborted connection. Never a clean end, never a false `[DONE]`.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.errors import ProxyError
from proxy.headers import is_event_stream
from proxy.record import Record

# A client that stopped reading does not get its last event either.
_FAREWELL_TIMEOUT_S: Final = 0.5
_ANTHROPIC_PATH: Final = "/v1/messages"
_EVENT_END: Final = b"\n\n"


class Answer:
    """The response to one request, written piece by piece.

    Attributes:
        record: What is remembered of the request.
        response: The response; sent only once `has_begun`.
    """

    def __init__(self, request: web.Request, record: Record) -> None:
        self._request = request
        self.record = record
        self._last_chunk = _EVENT_END
        self.response = web.StreamResponse()

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; an error can then no longer become a status."""
        return self.response.prepared

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Send the status and the header.

        Raises:
            ConnectionError: Nobody is there to take it.
        """
        self.response = web.StreamResponse(status=status, headers=headers)
        self.record.status = status
        await self.response.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the body; returns when the client has room for more.

        Raises:
            ConnectionError: Nobody is there to take them.
        """
        self._last_chunk = chunk
        self.record.count(chunk)
        await self.response.write(chunk)

    async def finish(self) -> None:
        """Mark the body as complete.

        Raises:
            ConnectionError: Nobody is there to see it.
        """
        await self.response.write_eof()

    async def break_off(self, error: ProxyError) -> None:
        """End a body that cannot be completed so that no client takes it for complete."""
        transport = self._request.transport
        if transport is None:
            return
        # An event behind half an event would be read as part of it.
        if is_event_stream(self.response.headers) and self._last_chunk.endswith(_EVENT_END):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(_error_event(self._request.path, error))
                    transport.close()
                    return
        transport.abort()


def error_response(path: str, error: ProxyError) -> web.Response:
    """Return an error as the client libraries of this path understand it."""
    response = web.Response(
        status=error.status,
        headers=error.headers(),
        body=orjson.dumps(_error_body(path, error)),
        content_type="application/json",
    )
    if error.ends_connection:
        response.force_close()
    return response


def _error_event(path: str, error: ProxyError) -> bytes:
    name = b"event: error\n" if path.startswith(_ANTHROPIC_PATH) else b""
    return name + b"data: " + orjson.dumps(_error_body(path, error)) + _EVENT_END


def _error_body(path: str, error: ProxyError) -> dict[str, object]:
    if path.startswith(_ANTHROPIC_PATH):
        details = {"type": error.anthropic_type, "message": error.message}
        return {"type": "error", "error": details}
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": None,
            "code": error.code,
        }
    }
