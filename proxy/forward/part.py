"""The parts of one response: those to the prompts of an array, each from a lease of its own.

Whole responses are held until all are complete, streams are passed on as one stream. An error of
one part is the response to the request.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from multidict import CIMultiDict

from proxy.errors import UpstreamFailed
from proxy.forward.array import PromptArray
from proxy.forward.client_response import ResponseWriter
from proxy.forward.gather import GATHERED_MAX_BYTES, Gather, Renumber
from proxy.headers import JSON
from proxy.router.lease import Lease
from proxy.upstream.sse import DONE, Splitter

_LAST_EVENT: Final = b"data: " + DONE + b"\n\n"


class PartRefused(Exception):
    """An instance refused one of the prompts."""

    def __init__(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        super().__init__(status)
        self.status = status
        self.headers = headers
        self.body = body


class Part(ResponseWriter, Protocol):
    """One of them; `is_leased` is set once an instance has it."""

    is_leased: asyncio.Event

    def end(self) -> None:
        """Add its record to that of the request."""


class Parts(Protocol):
    def part(self, at: int, /) -> Part:
        """Return the writer for one prompt, from 0."""

    async def finish(self) -> None:
        """End the response, when all are complete."""


class _Part:
    def __init__(self, answer: ResponseWriter, at: int) -> None:
        self.record = answer.record.part()
        self.is_leased = asyncio.Event()
        self._answer = answer
        self._at = at

    def leased(self, lease: Lease) -> None:
        """Note that an instance has it now; the first sets the header fields of the response."""
        self.record.set_instance(
            lease.upstream.name, lease.expected_cached, lease.conversation_number
        )
        self.record.is_diverted = lease.is_diverted
        if self._answer.record.instance is None:
            self._answer.leased(lease)
        self.is_leased.set()

    def put(self, _chunk: bytes) -> bool:
        """Leave it to `write`."""
        return False

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self._answer.record.code = self.record.code
        raise PartRefused(status, headers, body)

    def end(self) -> None:
        self._answer.record.add(self.record)


class _WholePart(_Part):
    """One whole response, held here."""

    has_begun = False
    is_committed = False

    def __init__(self, answer: ResponseWriter, gather: Gather, at: int) -> None:
        super().__init__(answer, at)
        self._gather = gather
        self._body = bytearray()

    async def begin(self, status: int, _headers: CIMultiDict[str]) -> None:
        self.record.status = status
        self._body.clear()

    async def write(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > GATHERED_MAX_BYTES:
            raise UpstreamFailed("a response is too long; request a stream")

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)
        self._gather.add(self._at, bytes(self._body))
        self._body.clear()


class WholeParts:
    def __init__(self, answer: ResponseWriter, array: PromptArray) -> None:
        self._answer = answer
        self._gather = Gather(array)

    def part(self, at: int) -> Part:
        return _WholePart(self._answer, self._gather, at)

    async def finish(self) -> None:
        pieces = list(self._gather.pieces())
        length = str(sum(map(len, pieces)))
        headers = CIMultiDict({"Content-Type": JSON, "Content-Length": length})
        await self._answer.begin(200, headers)
        for piece in pieces:
            await self._answer.write(piece)
        await self._answer.finish()


class _StreamPart(_Part):
    def __init__(self, streams: StreamParts, answer: ResponseWriter, at: int) -> None:
        super().__init__(answer, at)
        self._streams = streams
        self._splitter = Splitter()
        self.is_committed = False

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self.is_committed = True
        self.record.status = status
        await self._streams.begin(status, headers)

    async def write(self, chunk: bytes) -> None:
        await self._streams.write(self._at, self._splitter.feed(chunk))

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)


class StreamParts:
    """Streams passed on as one: event by event, with one end."""

    def __init__(self, answer: ResponseWriter, array: PromptArray) -> None:
        self._answer = answer
        self._renumber = Renumber(array)
        self._turn = asyncio.Lock()

    def part(self, at: int) -> Part:
        return _StreamPart(self, self._answer, at)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin the response with the first of them."""
        async with self._turn:
            if not self._answer.is_committed:
                await self._answer.begin(status, headers)

    async def write(self, at: int, events: list[bytes]) -> None:
        passed = b"".join([self._renumber.event(at, event) for event in events])
        if passed:
            async with self._turn:
                await self._answer.write(passed)

    async def finish(self) -> None:
        await self._answer.finish(_LAST_EVENT if self._renumber.is_done else b"")


def parts_of(array: PromptArray, answer: ResponseWriter) -> Parts:
    kind = array.request.kind
    is_stream = array.request.is_stream and kind.generates
    return StreamParts(answer, array) if is_stream else WholeParts(answer, array)
