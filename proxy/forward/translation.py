"""Translates an instance's response into the format of another API (`RequestWriter`)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, Protocol

from multidict import CIMultiDict

from proxy.common.headers import is_event_stream
from proxy.errors import UpstreamFailed
from proxy.forward.response import PassedRequest, RequestWriter
from proxy.upstream.http1 import InvalidEvent

_WHOLE_MAX_BYTES: Final = 64 * 1024**2


class Events(Protocol):
    """Translates one stream; `is_over` is True after its last event."""

    is_over: bool

    def feed(self, chunk: bytes, /) -> bytes:
        """Translate the instance's next bytes; raises InvalidEvent."""


class TranslatedWriter(PassedRequest):
    """Passes a stream on event by event, and holds a whole response until it is complete.

    Subclasses translate.
    """

    def __init__(self, writer: RequestWriter) -> None:
        super().__init__(writer)
        self._events: Events | None = None
        self._has_passed = False  # `put` may follow the first bytes, which send the header
        self._broken: InvalidEvent | None = None
        self._status = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._held = bytearray()

    def new_events(self) -> Events:
        raise NotImplementedError

    def translate_whole(self, body: bytes) -> bytes:
        """Translate a whole response.

        Raises:
            ValueError, LookupError, TypeError, AttributeError: It has another format.
        """
        raise NotImplementedError

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._held.clear()
        self._status, self._headers = status, headers
        if is_event_stream(headers):
            await self._begin_stream(status, headers)

    async def _begin_stream(self, status: int, headers: CIMultiDict[str]) -> None:
        if self._events is None:  # `begin` is called for each piece before the first token
            self._events = self.new_events()
        await self._writer.begin(status, headers)

    def put(self, chunk: bytes) -> bool:
        if self._events is None or not self._has_passed or not self._writer.put(b""):
            return False
        try:
            return self._writer.put(self._feed(self._events, chunk))
        except InvalidEvent as error:  # the next `write` or `finish` raises it
            self._broken = error
            return False

    async def write(self, chunk: bytes) -> None:
        """Raises InvalidEvent, UpstreamFailed."""
        if self._events is None:
            self._hold(chunk)
        elif passed := self._feed(self._events, chunk):
            self._has_passed = True
            await self._writer.write(passed)

    async def finish(self, last: bytes = b"") -> None:
        """Raises UpstreamFailed if the stream has no end."""
        if self._events is None:
            self._hold(last)
            await self._finish_whole()
            return
        passed = self._feed(self._events, last)
        if not self._events.is_over:
            if passed:
                await self._writer.write(passed)
            raise UpstreamFailed(
                f"{self.record.instance} ended its stream before the answer was complete"
            )
        await self._writer.finish(passed)

    def _feed(self, events: Events, chunk: bytes) -> bytes:
        if self._broken is not None:
            raise self._broken
        return events.feed(chunk)

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        if len(self._held) > _WHOLE_MAX_BYTES:
            raise UpstreamFailed(
                f"the response of {self.record.instance} is too long; request a stream"
            )

    async def _finish_whole(self) -> None:
        body = bytes(self._held)
        if self._status == HTTPStatus.OK:
            try:
                body = self.translate_whole(body)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise UpstreamFailed(
                    f"{self.record.instance} answered in another format: {error!r}"
                ) from error
        self._headers["Content-Length"] = str(len(body))
        await self._writer.begin(self._status, self._headers)
        await self._writer.finish(body)
