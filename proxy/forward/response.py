"""Writes to a client: a response, an error in the format of its API, or an aborted connection.

A request may wait long: in a queue, while a model loads or while its prompt is computed. Clients,
and proxies between, give up on a response that does not begin. So a stream begins after two
seconds, and a ping follows every few seconds: a comment or event that client libraries skip. After
the first ping an error can no longer be a status; it becomes the last event of a complete body.

A response that breaks after the first byte cannot be repaired. A stream gets one more event with
the error, and the connection ends without the end mark of the body; any other body ends in an
aborted connection. It never ends as if complete, and never with a false `[DONE]`.

`PassedResponse` forwards all calls to another writer; subclasses change or hold the body.
`ExplainedWriter` adds the explanation of a request if a header asks for it: to a whole response as
the member `corral`; to a stream of OpenAI's completions as one more chunk, with no choices, before
`[DONE]`; to other streams as the member in their last event.

Source: WHATWG HTML, section "Authoring notes" of server-sent events, on comments as pings;
Anthropic's streaming API, event `ping`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.common.headers import (
    EVENT_STREAM,
    EXPLAIN,
    FALLBACK,
    RESPONSE_HEADERS,
    SLOT,
    for_client,
    is_event_stream,
)
from proxy.errors import ProxyError, UpstreamFailed
from proxy.http.error_responses import EVENT_END, error_body, error_event
from proxy.observe.explanation import explain, own_figures
from proxy.observe.record import AccessRecord
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import DONE

# A client that stopped reading cannot take its last event either.
_FAREWELL_TIMEOUT_S: Final = 0.5
FIRST_PING_S: Final = 2.0
INTERVAL_S: Final = 10.0
_COMMENT: Final = b":\n\n"
_ANTHROPIC_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
# A write waits if the transport buffers more than this. Source: aiohttp, StreamWriter.write;
# asyncio and uvloop, the default high-water mark.
_BUFFER_BYTES: Final = 64 * 1024
_FREE: Final = contextlib.nullcontext()


class ResponseWriter(Protocol):
    """Takes the response to one request, or to one prompt of an array.

    The methods that send raise ConnectionError if the client has left.
    """

    record: AccessRecord

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; after that, an error can no longer be a status."""

    @property
    def is_committed(self) -> bool:
        """Whether any of an instance's response was sent; after that, no other can take over."""

    def note_lease(self, lease: Lease, /) -> None:
        """Note that an instance has the request now."""

    async def begin(self, status: int, headers: CIMultiDict[str], /) -> None:
        """Set the status and the header."""

    async def write(self, chunk: bytes, /) -> None:
        """Take bytes of the body; return when there is room for more."""

    def put(self, chunk: bytes, /) -> bool:
        """Take bytes of the body without waiting; return False, with nothing taken, if impossible.

        With no bytes, only return whether it is possible.
        """

    async def finish(self, last: bytes = b"", /) -> None:
        """Take the last bytes of the body."""

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes, /) -> None:
        """Take an instance's own error."""


class RequestWriter(ResponseWriter, Protocol):
    def start_pings(self, kind: EndpointKind, /) -> None:
        """Send pings until the response begins, or until `cancel_pings`."""

    async def cancel_pings(self) -> None:
        """Send no further ping."""


class _Response(web.StreamResponse):
    """A response whose header is sent in one packet with the first bytes of its body."""

    # aiohttp does the same for its own whole responses, without a public name for it.
    _send_headers_immediately = False


class ClientResponse:
    """The response to one request (`RequestWriter`).

    Attributes:
        stream_type: The media type of a stream.
        piece_end: The end of each piece of a stream.
        extra_headers: Header fields that are added to every response of an instance.
        requested_model: The model that the client named, if another may answer; else None.
    """

    stream_type: ClassVar[str] = EVENT_STREAM
    piece_end: ClassVar[bytes] = EVENT_END

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        self._request = request
        self.record = record
        self._last_chunk = self.piece_end
        self._response: web.StreamResponse | None = None
        self._is_chunked = False
        self.is_committed = False
        self.extra_headers: Mapping[str, str] = {}
        self.requested_model: str | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self._ping_task: asyncio.Task[None] | None = None
        self._pings_over: asyncio.Event | None = None

    def writer(self) -> RequestWriter:
        return ExplainedWriter(self) if EXPLAIN in self._request.headers else self

    def ping(self, kind: EndpointKind) -> bytes:
        return _ANTHROPIC_PING if kind is EndpointKind.MESSAGES else _COMMENT

    def error_piece(self, body: bytes) -> bytes:
        """Return the last piece of a stream: an error in the format of the API."""
        return error_event(self._request.path, body)

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response for aiohttp; an empty one before `begin`."""
        return _Response() if self._response is None else self._response

    def note_lease(self, lease: Lease) -> None:
        self.record.set_instance(
            lease.upstream.name, lease.expected_cached, lease.conversation_number
        )
        self.record.is_diverted = lease.is_diverted
        traces = {"X-Corral-Instance": lease.upstream.name}
        if lease.position:
            traces["X-Corral-Queue-Position"] = str(lease.position)
            traces["X-Corral-Queue-Ms"] = str(round(lease.queued_s * 1000))
        self.extra_headers = traces
        if self.requested_model is not None:
            self.record.model, self.record.fallback_for = lease.request.model, self.requested_model
            self.extra_headers = {**self.extra_headers, FALLBACK: lease.request.model}

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Set the status and the header, unless a ping was sent.

        They are sent with the first bytes of the body, or with its end.
        """
        await self._stop_pings()
        self.is_committed = True
        if not self.has_begun:
            headers.update(self.extra_headers)
            await self._prepare(status, headers)

    def start_pings(self, kind: EndpointKind) -> None:
        """Send pings after two seconds until the response begins, or until `cancel_pings`."""

        def begin() -> None:
            # The task ends with the request: `cancel_pings` waits for it.
            self._pings_over = over = asyncio.Event()
            self._ping_task = loop.create_task(self._send_pings(kind, over))

        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(FIRST_PING_S, begin)

    async def cancel_pings(self) -> None:
        """Send no further ping, even if one is half sent."""
        self._stop_timer()
        if self._ping_task is not None and not self._ping_task.done():
            self._ping_task.cancel()
            await asyncio.wait([self._ping_task])

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send an instance's own error: unchanged, or as an event after a ping."""
        await self._stop_pings()
        if self.has_begun:
            self.record.status = status
            body = self.error_piece(body)
        await self.begin(status, headers)
        await self.finish(body)

    async def write(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        self.record.count(chunk)
        with self._time_write(len(chunk)):
            await self.response.write(chunk)

    def put(self, chunk: bytes) -> bool:
        """Send bytes of a stream that has begun without waiting.

        Returns False, with nothing sent, if the kernel has not yet taken the bytes sent before, or
        if the client has left, for which `write` raises.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing() or transport.get_write_buffer_size():
            return False
        if not chunk:
            return True
        self._last_chunk = chunk
        self.record.count(chunk)
        transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self._is_chunked else chunk)
        return True

    async def finish(self, last: bytes = b"") -> None:
        self.record.count(last)
        with self._time_write(len(last)):
            await self.response.write_eof(last)

    async def abort(self, error: ProxyError) -> None:
        """End an incomplete body in a way that no client takes for a complete one."""
        transport = self._request.transport
        if transport is None:
            return
        if not self.is_committed:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(self._error_piece(error))
                    await self.response.write_eof()
            return
        content_type = self.response.headers.get("Content-Type", "").lower()
        is_stream = content_type.startswith(self.stream_type)
        # After half an event, a client would read the error as part of that event.
        if is_stream and self._last_chunk.endswith(self.piece_end):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(self._error_piece(error))
                    transport.close()
                    return
        transport.abort()

    def _time_write(self, size_bytes: int) -> AbstractContextManager[None]:
        transport = self._request.transport
        is_behind = transport is not None and transport.get_write_buffer_size()
        return (
            self.record.timeline.time_stall() if is_behind or size_bytes > _BUFFER_BYTES else _FREE
        )

    def _error_piece(self, error: ProxyError) -> bytes:
        return self.error_piece(orjson.dumps(error_body(self._request.path, error)))

    async def _send_pings(self, kind: EndpointKind, over: asyncio.Event) -> None:
        # aiohttp ends the request of a client that left.
        with contextlib.suppress(ConnectionError):
            while not over.is_set():
                if not self.has_begun:
                    headers = CIMultiDict({"Content-Type": EVENT_STREAM})
                    passed = for_client(headers)
                    passed["Content-Type"] = self.stream_type
                    await self._prepare(200, passed)
                await self.response.write(self.ping(kind))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await over.wait()

    async def _stop_pings(self) -> None:
        """Send no further ping; return when none is half sent."""
        self._stop_timer()
        if self._ping_task is not None and self._pings_over is not None:
            self._pings_over.set()
            await asyncio.wait([self._ping_task])

    def _stop_timer(self) -> None:
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None

    async def _prepare(self, status: int, headers: CIMultiDict[str]) -> None:
        headers.update(self._request[RESPONSE_HEADERS])
        self._response = _Response(status=status, headers=headers)
        self.record.status = status
        await self._response.prepare(self._request)
        self._is_chunked = "Transfer-Encoding" in self._response.headers


_Writer = TypeVar("_Writer", bound=ResponseWriter)


class PassedResponse(Generic[_Writer]):
    """A `ResponseWriter` that forwards to another one; subclasses write the body."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self.record = writer.record

    @property
    def has_begun(self) -> bool:
        return self._writer.has_begun

    @property
    def is_committed(self) -> bool:
        return self._writer.is_committed

    def note_lease(self, lease: Lease) -> None:
        self._writer.note_lease(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        await self._writer.begin(status, headers)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        await self._writer.refuse(status, headers, body)


class PassedRequest(PassedResponse[RequestWriter]):
    def start_pings(self, kind: EndpointKind) -> None:
        self._writer.start_pings(kind)

    async def cancel_pings(self) -> None:
        await self._writer.cancel_pings()


MEMBER: Final = "corral"
_HELD_MAX_BYTES: Final = 64 * 1024**2
_END: Final = b"\n\n"
# The last event of a stream of OpenAI's completions, Anthropic's messages, OpenAI's responses and
# llama-server's own completion. Quotes within texts are escaped.
_LAST: Final = re.compile(
    rb'^data: \[DONE\]|^event: (?:message_stop|response\.(?:completed|incomplete))|"stop":true',
    re.MULTILINE,
)
_IN_ALL_CHUNKS: Final = ("id", "object", "created", "model", "system_fingerprint")


class ExplainedWriter(PassedRequest):
    def __init__(self, writer: RequestWriter) -> None:
        super().__init__(writer)
        self._is_stream = False
        self._status = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._lease: Lease | None = None
        self._held = b""
        self._passed = b""  # the last events that were sent

    def note_lease(self, lease: Lease) -> None:
        self._lease = lease
        super().note_lease(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        number = self._lease.slot_number if self._lease else None
        if number is not None:
            headers[SLOT] = str(number)
        self._status, self._headers, self._is_stream = status, headers, is_event_stream(headers)
        if self._is_stream:
            await self._writer.begin(status, headers)
        else:
            self._held = b""  # discards the response of an instance that broke off

    def put(self, chunk: bytes) -> bool:
        if not self._is_stream or not self._writer.put(b""):
            return False
        passed = self._feed(chunk)
        return self._writer.put(passed) if passed else True

    async def write(self, chunk: bytes) -> None:
        """Raises UpstreamFailed if the body is too large."""
        if passed := self._feed(chunk):
            await self._writer.write(passed)

    async def finish(self, last: bytes = b"") -> None:
        passed = self._feed(last)
        figures = self.record.figures()
        explanation = explain(own_figures(figures) if self.record.hides_others else figures)
        if self._is_stream:
            end = _with_last(self._held, self._passed, explanation.as_json())
            await self._writer.finish(passed + end)
            return
        body = _with_member(self._held, explanation.as_json())
        self._headers["Content-Length"] = str(len(body))
        await self._writer.begin(self._status, self._headers)
        await self._writer.finish(body)

    def _feed(self, chunk: bytes) -> bytes:
        """Return the bytes to pass on now: the whole events of a stream before its last one."""
        self._held += chunk
        if len(self._held) > _HELD_MAX_BYTES:
            raise UpstreamFailed(
                f"the response of {self.record.instance} is too long to be explained"
            )
        if not self._is_stream:
            return b""
        last = _LAST.search(self._held)
        at = self._held.rfind(_END, 0, last.start() if last else len(self._held))
        whole = at + len(_END) if at >= 0 else 0
        passed, self._held = self._held[:whole], self._held[whole:]
        self._passed = passed or self._passed
        return passed


def _with_member(body: bytes, explanation: Mapping[str, Any]) -> bytes:
    """Add the explanation to a JSON object; other bodies stay unchanged."""
    whole = body.rstrip()
    if not (whole.startswith(b"{") and whole.endswith(b"}")):
        return body
    comma = b"" if not whole[1:-1].strip() else b","
    return whole[:-1] + comma + orjson.dumps({MEMBER: explanation})[1:]


def _with_last(last: bytes, passed: bytes, explanation: Mapping[str, Any]) -> bytes:
    """Add the explanation to the end of a stream; an incomplete end stays unchanged."""
    event, end, rest = last.partition(_END)
    if DONE in event:
        chunk = {**_shared_chunk_members(passed), MEMBER: explanation}
        return b"data: " + orjson.dumps(chunk) + _END + last
    if not event.endswith(b"}"):
        return last
    return event[:-1] + b"," + orjson.dumps({MEMBER: explanation})[1:] + end + rest


def _shared_chunk_members(passed: bytes) -> dict[str, Any]:
    """Return the members that all chunks of a stream share, as the last sent chunk has them."""
    line = passed.rstrip().rpartition(b"data: ")[2]
    try:
        chunk = orjson.loads(line)
        shared = {name: chunk[name] for name in _IN_ALL_CHUNKS if name in chunk}
    except (ValueError, TypeError):
        shared = {}
    return {"choices": [], **shared}
