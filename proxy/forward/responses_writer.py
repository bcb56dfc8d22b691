"""Passes the engine's response on as OpenAI's Responses API has it (`RequestWriter`)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

import orjson
from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.errors import UpstreamFailed
from proxy.forward.client_response import RequestWriter
from proxy.headers import is_event_stream
from proxy.request import ProxyRequest
from proxy.responses.response_object import completed, repeated
from proxy.responses.stored_turn import StoredTurn
from proxy.responses.stream_events import StreamEvents
from proxy.router.lease import Lease
from proxy.upstream.sse import InvalidEvent

_WHOLE_MAX_BYTES: Final = 64 * 1024**2


class ResponsesWriter:
    """A stream is passed on event by event; a whole response is held until it is complete."""

    def __init__(
        self, writer: RequestWriter, request: ProxyRequest, turn: StoredTurn | None = None
    ) -> None:
        self.record = writer.record
        self._writer = writer
        self._turn = turn
        self._base = {"model": request.json.get("model", request.model), **repeated(request.json)}
        if turn is not None:
            self._base["store"] = turn.is_stored
            self._base["previous_response_id"] = turn.previous_response_id
        self._events: StreamEvents | None = None
        self._broken: InvalidEvent | None = None
        self._status = 0
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._held = bytearray()

    @property
    def has_begun(self) -> bool:
        return self._writer.has_begun

    @property
    def is_committed(self) -> bool:
        return self._writer.is_committed

    def leased(self, lease: Lease) -> None:
        self._writer.leased(lease)

    def keep_alive(self, kind: EndpointKind) -> None:
        self._writer.keep_alive(kind)

    async def end_wait(self) -> None:
        await self._writer.end_wait()

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._held.clear()
        self._status, self._headers = status, headers
        if is_event_stream(headers):
            await self._begin_stream(status, headers)

    async def _begin_stream(self, status: int, headers: CIMultiDict[str]) -> None:
        if self._events is None:  # it is begun again with each piece before the first token
            now = int(datetime.now(tz=UTC).timestamp())
            self._events = StreamEvents(self._base, f"resp_{uuid4().hex}", now)
        await self._writer.begin(status, headers)

    def put(self, chunk: bytes) -> bool:
        if self._events is None or not self._writer.put(b""):
            return False
        try:
            return self._writer.put(self._fed(self._events, chunk))
        except InvalidEvent as error:  # raised where the request waits
            self._broken = error
            return False

    async def write(self, chunk: bytes) -> None:
        """Raises InvalidEvent, UpstreamFailed."""
        if self._events is None:
            self._hold(chunk)
        elif passed := self._fed(self._events, chunk):
            await self._writer.write(passed)

    async def finish(self, last: bytes = b"") -> None:
        """Raises UpstreamFailed where the stream has no end."""
        if self._events is None:
            self._hold(last)
            await self._finish_whole()
            return
        passed = self._fed(self._events, last)
        if not self._events.is_over:
            if passed:
                await self._writer.write(passed)
            raise UpstreamFailed(
                f"{self.record.instance} ended its stream before the answer was complete"
            )
        await self._writer.finish(passed)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        await self._writer.refuse(status, headers, body)

    def _fed(self, events: StreamEvents, chunk: bytes) -> bytes:
        if self._broken is not None:
            raise self._broken
        passed, response = events.feed(chunk), events.response
        if response is not None:
            self._store(response)
        return passed

    def _store(self, response: Mapping[str, Any]) -> None:
        """Before the client can name it in its next request."""
        if self._turn is not None:
            self._turn.add(response)
            self._turn = None

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        if len(self._held) > _WHOLE_MAX_BYTES:
            raise UpstreamFailed(
                f"the response of {self.record.instance} is too long; request a stream"
            )

    async def _finish_whole(self) -> None:
        body = bytes(self._held)
        if self._status == HTTPStatus.OK:
            body = self._whole(body)
        self._headers["Content-Length"] = str(len(body))
        await self._writer.begin(self._status, self._headers)
        await self._writer.finish(body)

    def _whole(self, body: bytes) -> bytes:
        try:
            given = orjson.loads(body)
            if "output" not in given:  # no response
                return body
            response = completed(self._base, given)
            self._store(response)
            return orjson.dumps(response)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(
                f"{self.record.instance} answered in another format: {error!r}"
            ) from error
