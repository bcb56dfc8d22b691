"""Writes to a client: a response, an error in the format of its API, or an aborted connection.

A request may wait long: in a queue, while a model loads or while its prompt is computed. Clients,
and proxies between, give up on a response that does not begin. So a stream begins after two
seconds, and a ping follows every few seconds: a comment or event that client libraries skip. After
the first ping an error can no longer be a status; it becomes the last event of a complete body.

A response that breaks after the first byte cannot be repaired. A stream gets one more event with
the error, and the connection ends without the end mark of the body; any other body ends in an
aborted connection. It never ends as if complete, and never with a false `[DONE]`.

`Response` passes each piece through its `StreamTransform`s, the one nearest to the instance first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus
from typing import ClassVar, Final

import orjson
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

from proxy.common.headers import (
    EVENT_STREAM,
    FALLBACK,
    RESPONSE_HEADERS,
    for_client,
    is_event_stream,
)
from proxy.errors import ProxyError, UpstreamFailed
from proxy.http.api_formats import ApiFormat, format_of
from proxy.observe.record import AccessRecord
from proxy.router.lease import Lease
from proxy.upstream.http1 import InvalidEvent, Splitter

# A client that stopped reading cannot take its last event either.
_FAREWELL_TIMEOUT_S: Final = 0.5
FIRST_PING_S: Final = 2.0
INTERVAL_S: Final = 10.0
# A write waits if the transport buffers more than this. Source: asyncio and uvloop, the default
# high-water mark.
_BUFFER_BYTES: Final = 64 * 1024
# A chunk of a body, and the end of its chunks. Source: RFC 9112, section 7.1.
_FRAME: Final = b"%x\r\n%b\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_NO_FIELDS: Final = CIMultiDict[str]()
# Statuses without a body. Source: RFC 9112, section 6.3.
_WITHOUT_BODY: Final = frozenset({204, 304})


class Abandoned(Exception):
    """A transform wants no more of this response."""


class Discarded(Abandoned):
    """The client gets nothing of this response."""


class StreamTransform:
    """Changes a response on its way to the client; this one changes nothing.

    `feed`, `end`, `whole` and `refuse` raise Abandoned, InvalidEvent or UpstreamFailed. `whole` may
    also raise ValueError, LookupError, TypeError or AttributeError for a body of another format.
    """

    # whether a whole response is held until its end, for `whole`; otherwise it passes like a stream
    holds_whole: ClassVar[bool] = True
    holds_streams: ClassVar[bool] = False  # whether a stream is held like a whole response
    is_delayed: ClassVar[bool] = False  # whether the header waits for the first bytes
    is_over: bool = True  # whether a stream may end now
    max_bytes: int = 64 * 1024**2  # the largest body that is held
    too_long: str = "is too long; request a stream"  # the message about a larger body

    def note_lease(self, lease: Lease) -> None:
        """Note that an instance has the request now, maybe after another one failed."""

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Take the header, and change it; may be called again before the first bytes."""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes of a stream; return those to pass on."""
        return chunk

    def end(self) -> bytes:
        """Return the last bytes of a stream, after all its bytes."""
        return b""

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (for others)
        return body

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:  # noqa: ARG002
        """Take an instance's own error, in the format of the client's API."""
        return body


class EventTransform(StreamTransform):
    """Changes each event of a stream.

    Errors of an event in another format (LookupError, TypeError, AttributeError) become
    InvalidEvent.
    """

    def __init__(self) -> None:
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        try:
            return b"".join([self.event(event) for event in self._splitter.feed(chunk)])
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of a response: {error!r}") from error

    def event(self, event: bytes) -> bytes:
        """Return the bytes to pass on for an event."""
        raise NotImplementedError


class Response:
    """Takes the response to one request, or to one prompt of an array; subclasses send it.

    The methods that send raise ConnectionError if the client has left.

    Attributes:
        is_committed: Whether any of an instance's response was sent; after that, no other can take
            over.
        has_body: False for the response to HEAD.
    """

    has_body: bool = True

    def __init__(self, record: AccessRecord, api: ApiFormat, *transforms: StreamTransform) -> None:
        self.record = record
        self.api = api
        self.is_committed = False
        self._transforms = list(transforms)
        self._status, self._headers = 0, _NO_FIELDS
        self._held = bytearray()
        self._is_held = self._is_open = False
        self._broken: Exception | None = None

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; after that, an error can no longer be a status."""
        return False

    def add(self, transform: StreamTransform) -> None:
        """Pass the instances' bytes through a transform, before all others."""
        self._transforms.insert(0, transform)

    def remove(self, transform: StreamTransform) -> None:
        self._transforms.remove(transform)

    @contextmanager
    def through(self, transform: StreamTransform) -> Iterator[None]:
        """Pass the instances' bytes in the block through a transform, before all others."""
        self.add(transform)
        try:
            yield
        finally:
            self.remove(transform)

    def note_lease(self, lease: Lease) -> None:
        """Note that an instance has the request now."""
        self.record.set_instance(
            lease.upstream.name, lease.expected_cached, lease.conversation_number
        )
        self.record.is_diverted = lease.is_diverted
        for transform in self._transforms:
            transform.note_lease(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Set the status and the header; without effect if another instance had begun to send."""
        if self.is_committed:
            await self._end_pause()
            return
        self._status, self._headers = status, headers
        self._held.clear()
        self._is_open = self._is_held = is_delayed = False
        if self._transforms:
            is_stream = is_event_stream(headers)
            for transform in self._transforms:
                transform.begin(status, headers)
                self._is_held |= transform.holds_whole and (
                    transform.holds_streams or not is_stream
                )
                is_delayed |= transform.is_delayed
        if not (self._is_held or is_delayed):
            await self._open()

    async def write(self, chunk: bytes) -> None:
        """Take bytes of the body; return when there is room for more."""
        if self._transforms and not (chunk := self._feed(chunk)):
            return
        if not self._is_open:
            await self._open()
        await self._send(chunk)

    def put(self, chunk: bytes, framed: bytes) -> bool:  # noqa: ARG002 (for subclasses)
        """Take bytes of the body without waiting; return False, with none taken, if impossible.

        `framed` is the same bytes as a chunk of a chunked body, or empty.
        """
        return False

    async def finish(self, last: bytes = b"") -> None:
        """Take the last bytes of the body; raises UpstreamFailed if a stream lacks its end."""
        if self._transforms:
            try:
                last = self._end_whole(last) if self._is_held else await self._end(last)
            except Discarded:
                return
        if not self._is_open:
            await self._open()
        await self._send_last(last)

    def ends_at_once(self, size_bytes: int) -> bool:  # noqa: ARG002 (for subclasses)
        """Whether `finish` waits for nothing, and needs nothing that is learned of the response."""
        return False

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Take an instance's own error, in the format of the client's API."""
        try:
            for transform in self._transforms:
                body = transform.refuse(status, headers, body)
        except Discarded:
            return
        await self._send_error(status, headers, body)

    def start_pings(self) -> None:
        """Send pings until the response begins, or until `cancel_pings`."""

    def note_pause(self) -> None:
        """Note that the response pauses between two events; `begin` ends the pause."""

    async def cancel_pings(self) -> None:
        """Send no further ping, even if one is half sent."""

    async def _end_pause(self) -> None:
        """Send no further ping before the rest of the response."""

    async def _send_header(self, status: int, headers: CIMultiDict[str]) -> None:
        raise NotImplementedError

    async def _send(self, chunk: bytes) -> None:
        raise NotImplementedError

    async def _send_last(self, last: bytes) -> None:
        await self._send(last)

    async def _send_error(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        await self._send_header(status, headers)
        await self._send_last(body)

    async def _open(self) -> None:
        self._is_open = True
        await self._send_header(self._status, self._headers)

    def _feed(self, chunk: bytes) -> bytes:
        self._raise_broken()
        if self._is_held:
            self._hold(chunk)
            return b""
        for transform in self._transforms:
            chunk = transform.feed(chunk)
        return chunk

    def _raise_broken(self) -> None:
        """Raise the error that `put` could not raise."""
        if broken := self._broken:
            self._broken = None
            raise broken

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        for transform in self._transforms:
            if transform.holds_whole and len(self._held) > transform.max_bytes:
                raise UpstreamFailed(f"the response of {self.record.instance} {transform.too_long}")

    async def _end(self, last: bytes) -> bytes:
        self._raise_broken()
        for number, transform in enumerate(self._transforms, 1):
            last = transform.feed(last)
            if not transform.is_over:
                for later in self._transforms[number:]:
                    last = later.feed(last)
                if last:
                    await self._send(last)
                raise UpstreamFailed(
                    f"{self.record.instance} ended its stream before the answer was complete"
                )
            last += transform.end()
        return last

    def _end_whole(self, last: bytes) -> bytes:
        self._hold(last)
        body = bytes(self._held)
        self._held.clear()
        try:
            for transform in self._transforms:
                body = transform.whole(self._status, body)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(
                f"{self.record.instance} answered in another format: {error!r}"
            ) from error
        self._headers.pop("Content-Length", None)  # for HEAD too: the body would have another one
        if self.has_body:
            self._headers["Content-Length"] = str(len(body))
        return body


class _Written(web.StreamResponse):
    """The response of a handler that has written it: aiohttp has nothing to send.

    These are the members that aiohttp's server uses of a handler's response.
    """

    prepared = True
    keep_alive = True
    headers = _NO_FIELDS

    def __init__(self, headers: CIMultiDict[str], *, is_kept: bool) -> None:
        # Not aiohttp's initialiser, whose attributes only its own writing needs.
        self.is_complete = False
        self.headers = headers
        self.keep_alive = is_kept

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing: the header is written with the first bytes of the body."""

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002 (aiohttp passes none)
        """Raise ConnectionResetError, on which aiohttp closes the connection, before the end."""
        if not self.is_complete:
            raise ConnectionResetError


_PHRASES: Final[Mapping[int, str]] = {status.value: status.phrase for status in HTTPStatus}


def _head(version: str, status: int, headers: CIMultiDict[str]) -> bytes:
    """Return the header of a response; raises ValueError if a field has a line break."""
    fields = [f"{name}: {value}" for name, value in headers.items()]
    first = f"{version} {status} {_PHRASES.get(status, '')}"
    head = "\r\n".join((first, *fields, _date_field(int(time.monotonic())), "\r\n"))
    if len(head.splitlines()) != len(fields) + 3:
        raise ValueError("a field of the header has a line break")
    return head.encode()


@functools.lru_cache(maxsize=1)
def _date_field(_now_s: int) -> str:
    return f"Date: {format_datetime(datetime.now(UTC), usegmt=True)}"


class Pings:
    """Calls `send` at once and then every few seconds, until it is stopped."""

    def __init__(self, send: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._over = asyncio.Event()
        # The task ends with the request: `stop` waits for it.
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self, *, is_urgent: bool = False) -> None:
        """Send no further ping; return when none is half sent, or at once if that is urgent."""
        self._over.set()
        if not self._task.done():
            if is_urgent:
                self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        # aiohttp ends the request of a client that left.
        with contextlib.suppress(ConnectionError):
            while not self._over.is_set():
                await self._send()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._over.wait()


class ClientResponse(Response):
    def __init__(
        self,
        request: web.BaseRequest,
        record: AccessRecord,
        *transforms: StreamTransform,
        api: ApiFormat | None = None,
    ) -> None:
        super().__init__(record, api or format_of(request.path), *transforms)
        self.has_body = request.method != "HEAD"
        self._request = request
        self._last_chunk = self.api.piece_end
        # The following three are set when the header is known.
        self._response: _Written | None = None
        self._is_chunked = False
        self._transport: asyncio.Transport | None = None
        self._head = b""  # until it is written, with the first bytes of the body
        self._extra_headers: Mapping[str, str] = {}
        self._requested_model: str | None = None
        self._first_ping: asyncio.TimerHandle | None = None  # until the response begins
        self._pings: Pings | None = None

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    @property
    def response(self) -> web.StreamResponse:
        """The response for aiohttp; an empty one before the header."""
        return web.StreamResponse() if self._response is None else self._response

    def note_fallback(self, requested_model: str) -> None:
        """Note that another model than the requested one may answer."""
        self._requested_model = requested_model

    def note_lease(self, lease: Lease) -> None:
        super().note_lease(lease)
        traces = {"X-Corral-Instance": lease.upstream.name}
        if lease.position:
            traces["X-Corral-Queue-Position"] = str(lease.position)
            traces["X-Corral-Queue-Ms"] = str(round(lease.queued_s * 1000))
        if self._requested_model is not None:
            self.record.model, self.record.fallback_for = lease.request.model, self._requested_model
            traces[FALLBACK] = lease.request.model
        self._extra_headers = traces

    def start_pings(self) -> None:
        loop = asyncio.get_running_loop()
        self._first_ping = loop.call_later(FIRST_PING_S, self._begin_pings)

    def note_pause(self) -> None:
        if self.is_committed:
            self._cancel_first_ping()
            loop = asyncio.get_running_loop()
            self._first_ping = loop.call_later(FIRST_PING_S, self._ping_on)

    async def _end_pause(self) -> None:
        self._cancel_first_ping()
        await self._stop_pings()

    async def cancel_pings(self) -> None:
        self._cancel_first_ping()
        if self._pings:
            await self._stop_pings(is_urgent=True)

    def _cancel_first_ping(self) -> None:
        if self._first_ping:
            self._first_ping.cancel()
            self._first_ping = None  # which refers to this object

    def put(self, chunk: bytes, framed: bytes) -> bool:
        """Send bytes of a stream that has begun without waiting.

        Returns False, with nothing sent, if the kernel has not yet taken the bytes sent before, if
        the client has left, or if a transform fails; `write` or `finish` then raises the error.
        """
        transport = self._transport
        if transport is None or self._head:
            return False
        if transport.is_closing() or transport.get_write_buffer_size():
            return False
        if self._transforms:
            try:
                chunk = self._feed(chunk)
            except (Abandoned, InvalidEvent, UpstreamFailed) as error:
                self._broken = error
                return False
            if not chunk:
                return True
            framed = b""
        self._last_chunk = chunk
        self.record.bytes_out += len(chunk)
        if not self._is_chunked:
            framed = chunk
        transport.write(framed or _FRAME % (len(chunk), chunk))
        return True

    def ends_at_once(self, size_bytes: int) -> bool:
        transport = self._transport
        if self._transforms or transport is None or size_bytes > _BUFFER_BYTES:
            return False
        return not (transport.is_closing() or transport.get_write_buffer_size())

    async def abort(self, error: ProxyError) -> None:
        """End an incomplete body in a way that no client takes for a complete one."""
        transport = self._transport
        if transport is None:
            return
        last = self.api.error_event(orjson.dumps(self.api.own_error(error)))
        content_type = self.response.headers.get("Content-Type", "").lower()
        is_stream = content_type.startswith(self.api.stream_type)
        # After half an event, a client would read the error as part of that event.
        is_between = is_stream and self._last_chunk.endswith(self.api.piece_end)
        if is_between or not self.is_committed:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self._write(last, is_last=not self.is_committed)
                    if self.is_committed:
                        transport.close()
                    return
        if self.is_committed:
            transport.abort()

    async def _send_header(self, status: int, headers: CIMultiDict[str]) -> None:
        """Set the status and the header, unless a ping was sent.

        They are sent with the first bytes of the body, or with its end.
        """
        self.is_committed = True
        if self._pings:
            await self._stop_pings()
        if self._response is None:
            headers.update(self._extra_headers)
            self._prepare(status, headers)

    async def _send(self, chunk: bytes) -> None:
        self._last_chunk = chunk
        self.record.count(chunk)
        await self._write(chunk)

    async def _send_last(self, last: bytes) -> None:
        self.record.count(last)
        await self._write(last, is_last=True)

    async def _send_error(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Send an instance's own error: unchanged, or as an event after a ping."""
        if self._pings:
            await self._stop_pings()
        if self.has_begun:
            self.record.status = status
            body = self.api.error_event(body)
        await super()._send_error(status, headers, body)

    def _begin_pings(self) -> None:
        if not self.is_committed:
            self._ping_on()

    def _ping_on(self) -> None:
        self._first_ping = None
        self._pings = Pings(self._ping)

    async def _stop_pings(self, *, is_urgent: bool = False) -> None:
        if self._pings:
            await self._pings.stop(is_urgent=is_urgent)
            self._pings = None  # which refer to this object

    async def _ping(self) -> None:
        if not self.has_begun:
            headers = for_client(CIMultiDict({"Content-Type": EVENT_STREAM}))
            headers["Content-Type"] = self.api.stream_type
            self._prepare(200, headers)
        await self._write(self.api.ping())

    def _prepare(self, status: int, headers: CIMultiDict[str]) -> None:
        """Set the header, and with it how the end of the body is marked. Source: RFC 9112, 6.3."""
        request = self._request
        headers.update(request[RESPONSE_HEADERS])
        is_recent, is_kept = request.version >= HttpVersion11, request.keep_alive
        if self.has_body and "Content-Length" not in headers and status not in _WITHOUT_BODY:
            self._is_chunked, is_kept = is_recent, is_kept and is_recent
            if is_recent:
                headers["Transfer-Encoding"] = "chunked"
        if is_kept is not is_recent:
            headers.setdefault("Connection", "keep-alive" if is_kept else "close")
        self._head = _head("HTTP/1.1" if is_recent else "HTTP/1.0", status, headers)
        self._response = _Written(headers, is_kept=is_kept)
        self._transport = request.transport
        self.record.status = status

    async def _write(self, chunk: bytes, *, is_last: bool = False) -> None:
        """Write bytes of the body, after the header; return when there is room for more.

        Raises ConnectionResetError: the client has left.
        """
        transport, head, response = self._transport, self._head, self._response
        if transport is None or response is None or transport.is_closing():
            raise ConnectionResetError
        if self._is_chunked:
            chunk = _FRAME % (len(chunk), chunk) if chunk else b""
            chunk += _LAST_CHUNK if is_last else b""
        if head:
            chunk, self._head = head + chunk, b""
        is_behind = transport.get_write_buffer_size() or len(chunk) > _BUFFER_BYTES
        if chunk:
            transport.write(chunk)
        if is_behind:
            with self.record.timeline.time_stall():
                await self._request.writer.drain()
        response.is_complete = is_last
