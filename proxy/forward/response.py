"""What a client receives: a response, an error in the format of its API, or an aborted connection.

A request may wait long: in a queue, for a model to load, while its prompt is computed, and clients
and the proxies before them give up on a response that does not begin. So a stream begins after two
seconds, and every few seconds a comment follows, which client libraries skip. From then on an error
cannot be a status: it is the last event of a complete body.

A response that breaks after the first byte cannot be repaired. A stream gets one more event with
the error, and the connection ends without the end mark of the body; any other body ends in an
aborted connection. Never a clean end, never a false `[DONE]`.

`PassedResponse` passes on what belongs to a response; subclasses change or keep some of it.
`ExplainedWriter` adds the explanation of a request, for clients that ask for it by a header: a
whole response gets the member `corral`; a stream of OpenAI's completions gets one more chunk, with
no choices, before `[DONE]`; other streams get the member in their last event.

Source: WHATWG HTML, section "Authoring notes" of server-sent events, on comments as keep-alives;
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
from proxy.upstream.sse import DONE

# A client that stopped reading does not get its last event either.
_FAREWELL_TIMEOUT_S: Final = 0.5
FIRST_PING_S: Final = 2.0
INTERVAL_S: Final = 10.0
_COMMENT: Final = b":\n\n"
_ANTHROPIC_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
# A write waits where more than this is left in the transport. Source: aiohttp, StreamWriter.write;
# asyncio and uvloop, the default high-water mark.
_BUFFER_BYTES: Final = 64 * 1024
_FREE: Final = contextlib.nullcontext()


class ResponseWriter(Protocol):
    """Takes the response to one request or, of an array, to one prompt.

    The methods that send raise ConnectionError where the client has left.
    """

    record: AccessRecord

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; an error can then no longer become a status."""

    @property
    def is_committed(self) -> bool:
        """Whether anything of an instance's response was sent; no other can then take over."""

    def leased(self, lease: Lease, /) -> None:
        """Note that an instance has the request now."""

    async def begin(self, status: int, headers: CIMultiDict[str], /) -> None:
        """Set the status and the header."""

    async def write(self, chunk: bytes, /) -> None:
        """Take bytes of the body; returns when there is room for more."""

    def put(self, chunk: bytes, /) -> bool:
        """Take bytes of the body at once; return False, with nothing done, if that cannot be.

        No bytes only ask.
        """

    async def finish(self, last: bytes = b"", /) -> None:
        """Take the last bytes of the body."""

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes, /) -> None:
        """Take an instance's own error."""


class RequestWriter(ResponseWriter, Protocol):
    """Takes the response to a whole request."""

    def keep_alive(self, kind: EndpointKind, /) -> None:
        """Keep the client waiting until the response begins, or `end_wait`."""

    async def end_wait(self) -> None:
        """The wait is over."""


class _Response(web.StreamResponse):
    """A response whose header is sent with the first bytes behind it, in one packet."""

    # As aiohttp has it for its own whole responses; a public name for it there is none.
    _send_headers_immediately = False


class ClientResponse:
    """The response to one request (`RequestWriter`).

    Attributes:
        stream_type: The media type of a stream.
        piece_end: The end of each piece of a stream.
        extra_headers: Header fields that every response of an instance gets besides its own.
        requested_model: The model that the client named, where another may answer; else None.
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
        """Return what an instance's response is written to."""
        if EXPLAIN not in self._request.headers:
            return self
        return ExplainedWriter(self)

    def ping(self, kind: EndpointKind) -> bytes:
        """Return a piece of a stream that clients skip."""
        return _ANTHROPIC_PING if kind is EndpointKind.MESSAGES else _COMMENT

    def error_piece(self, body: bytes) -> bytes:
        """Return an error in the format of the API as the last piece of a stream."""
        return error_event(self._request.path, body)

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """For aiohttp; an empty one where nothing has begun."""
        return _Response() if self._response is None else self._response

    def leased(self, lease: Lease) -> None:
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
        """Set the status and the header, unless a comment was sent.

        They are sent with the first bytes of the body, or with its end.
        """
        await self._stop_pings()
        self.is_committed = True
        if not self.has_begun:
            headers.update(self.extra_headers)
            await self._prepare(status, headers)

    def keep_alive(self, kind: EndpointKind) -> None:
        """Send comments after two seconds until the response begins, or `end_wait`."""
        loop = asyncio.get_running_loop()
        self._ping_timer = loop.call_later(FIRST_PING_S, self._start_pings, kind)

    async def end_wait(self) -> None:
        """Send no further comment, whatever is half sent."""
        self._stop_timer()
        if self._ping_task is not None and not self._ping_task.done():
            self._ping_task.cancel()
            await asyncio.wait([self._ping_task])

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send an instance's own error: as it is, or as an event after a comment."""
        await self._stop_pings()
        if self.has_begun:
            self.record.status = status
            body = self.error_piece(body)
        await self.begin(status, headers)
        await self.finish(body)

    async def write(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        self.record.count(chunk)
        with self._timed(len(chunk)):
            await self.response.write(chunk)

    def put(self, chunk: bytes) -> bool:
        """Send bytes of a stream that has begun, at once; return False, with nothing sent, if not.

        They must wait where the kernel has yet to take what was sent before; where the client has
        left, `write` raises.
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
        """Send the last bytes of the body, and mark it as complete."""
        self.record.count(last)
        with self._timed(len(last)):
            await self.response.write_eof(last)

    async def abort(self, error: ProxyError) -> None:
        """End a body that cannot be completed so that no client takes it for complete."""
        transport = self._request.transport
        if transport is None:
            return
        if not self.is_committed:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(self._error_piece(error))
                    await self.response.write_eof()
            return
        # An event behind half an event would be read as part of it.
        if self._is_stream and self._last_chunk.endswith(self.piece_end):
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self.response.write(self._error_piece(error))
                    transport.close()
                    return
        transport.abort()

    def _timed(self, size_bytes: int) -> AbstractContextManager[None]:
        """Time a write as one that waits for the client, if it may have to wait."""
        transport = self._request.transport
        is_behind = transport is not None and transport.get_write_buffer_size()
        return (
            self.record.timeline.time_stall() if is_behind or size_bytes > _BUFFER_BYTES else _FREE
        )

    @property
    def _is_stream(self) -> bool:
        return self.response.headers.get("Content-Type", "").lower().startswith(self.stream_type)

    def _error_piece(self, error: ProxyError) -> bytes:
        return self.error_piece(orjson.dumps(error_body(self._request.path, error)))

    def _start_pings(self, kind: EndpointKind) -> None:
        # The task ends with the request: `end_wait` waits for it.
        self._pings_over = over = asyncio.Event()
        self._ping_task = asyncio.get_running_loop().create_task(self._send_pings(kind, over))

    async def _send_pings(self, kind: EndpointKind, over: asyncio.Event) -> None:
        # A client that left ends its request by itself.
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
        """Send no further comment; returns when none is half sent."""
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
    """A `ResponseWriter` before another one; subclasses write the body."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self.record = writer.record

    @property
    def has_begun(self) -> bool:
        return self._writer.has_begun

    @property
    def is_committed(self) -> bool:
        return self._writer.is_committed

    def leased(self, lease: Lease) -> None:
        self._writer.leased(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        await self._writer.begin(status, headers)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        await self._writer.refuse(status, headers, body)


class PassedRequest(PassedResponse[RequestWriter]):
    """A `RequestWriter` before another one."""

    def keep_alive(self, kind: EndpointKind) -> None:
        self._writer.keep_alive(kind)

    async def end_wait(self) -> None:
        await self._writer.end_wait()


MEMBER: Final = "corral"
_HELD_MAX_BYTES: Final = 64 * 1024**2
_END: Final = b"\n\n"
# The last event of a stream: of OpenAI's completions, Anthropic's messages, OpenAI's responses and
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
        self._passed = b""  # the last events that went out

    def leased(self, lease: Lease) -> None:
        self._lease = lease
        super().leased(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        number = self._lease.slot_number if self._lease else None
        if number is not None:
            headers[SLOT] = str(number)
        self._status, self._headers, self._is_stream = status, headers, is_event_stream(headers)
        if self._is_stream:
            await self._writer.begin(status, headers)

    def put(self, chunk: bytes) -> bool:
        if not self._is_stream or not self._writer.put(b""):
            return False
        passed = self._feed(chunk)
        return self._writer.put(passed) if passed else True

    async def write(self, chunk: bytes) -> None:
        """Raises UpstreamFailed for too large a body."""
        if passed := self._feed(chunk):
            await self._writer.write(passed)

    async def finish(self, last: bytes = b"") -> None:
        passed = self._feed(last)
        if self._is_stream:
            await self._writer.finish(passed + _with_last(self._held, self._passed, self._told()))
            return
        body = _with_member(self._held, self._told())
        self._headers["Content-Length"] = str(len(body))
        await self._writer.begin(self._status, self._headers)
        await self._writer.finish(body)

    def _told(self) -> Mapping[str, Any]:
        figures = self.record.figures()
        return explain(own_figures(figures) if self.record.hides_others else figures).as_json()

    def _feed(self, chunk: bytes) -> bytes:
        """Return what may pass now: of a stream, whole events before the last one."""
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


def _with_member(body: bytes, told: Mapping[str, Any]) -> bytes:
    """Return a JSON object with the explanation; other bodies as they are."""
    whole = body.rstrip()
    if not (whole.startswith(b"{") and whole.endswith(b"}")):
        return body
    comma = b"" if not whole[1:-1].strip() else b","
    return whole[:-1] + comma + orjson.dumps({MEMBER: told})[1:]


def _with_last(last: bytes, passed: bytes, told: Mapping[str, Any]) -> bytes:
    """Return the end of a stream with the explanation; without an end, what there is of it."""
    event, end, rest = last.partition(_END)
    if DONE in event:
        return (
            b"data: " + orjson.dumps({**_shared_chunk_members(passed), MEMBER: told}) + _END + last
        )
    if not event.endswith(b"}"):
        return last
    return event[:-1] + b"," + orjson.dumps({MEMBER: told})[1:] + end + rest


def _shared_chunk_members(passed: bytes) -> dict[str, Any]:
    """Return what all chunks of a stream have, of the last one that went out."""
    line = passed.rstrip().rpartition(b"data: ")[2]
    try:
        chunk = orjson.loads(line)
        found = {name: chunk[name] for name in _IN_ALL_CHUNKS if name in chunk}
    except (ValueError, TypeError):
        found = {}
    return {"choices": [], **found}
