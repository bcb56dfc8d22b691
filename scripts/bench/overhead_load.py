"""A light client: raw connections, one request at a time on each, every arrival timed.

It parses no more of an answer than it must to see its first byte, its events and its end; a client
that does more measures itself.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Final, cast

_EVENT: Final = b"data: {"
_LENGTH: Final = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_LOST_TIMEOUT_S: Final = 60


@dataclass(slots=True)
class Seen:
    """What was seen of some requests.

    Attributes:
        first_s: Seconds from each request to the first byte of its body.
        gap_s: Seconds between events that followed one another in a stream.
        answers: Requests that were answered to their end.
        tokens: Events that came.
        took_s: Seconds that it all took.
    """

    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    answers: int = 0
    tokens: int = 0
    took_s: float = 0.0


def body(*, is_stream: bool, tokens: int = 1, pause_us: int = 0) -> bytes:
    """Return a request that the fake engine understands, in OpenAI's words."""
    return (
        b'{"model":"bench","messages":[{"role":"user","content":"hello"}],"stream":%s,'
        b'"max_tokens":%d,"seed":%d}' % (b"true" if is_stream else b"false", tokens, pause_us)
    )


class Line(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, port: int, content: bytes, seen: Seen) -> None:
        self._port = port
        self._seen = seen
        self._transport: asyncio.Transport | None = None
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer none\r\n"
            b"Accept: */*\r\nUser-Agent: bench\r\nContent-Length: %d\r\n\r\n%b"
            % (port, len(content), content)
        )

    async def ask(self) -> None:
        """Send the request and read its answer to the end."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        self._tail, self._left, self._last_s = b"", -1, 0.0
        self._over: asyncio.Future[None] = loop.create_future()
        self._sent_s = time.perf_counter()
        assert self._transport is not None  # noqa: S101 (connected above)
        self._transport.write(self._request)
        await self._over
        self._seen.answers += 1

    def leave(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Be disconnected, which is fine between two requests."""
        self._transport = None
        if not self._over.done():
            self._over.set_exception(exc or ConnectionResetError("closed before its end"))

    def data_received(self, data: bytes) -> None:
        """Take what came and time it."""
        if self._over.done():
            return
        now_s = time.perf_counter()
        if not self._last_s:
            data = self._begun(self._tail + data, now_s)
            if not data:
                return
        if self._left >= 0:
            self._left -= len(data)
            self._end(is_over=self._left == 0)
            return
        joined = self._tail + data
        # What lay in the tail already was counted before: it is shorter than an event's beginning.
        if events := joined.count(_EVENT):
            self._seen.tokens += events
            if now_s != self._last_s:
                self._seen.gap_s.append(now_s - self._last_s)
            self._last_s = now_s
        self._tail = joined[-(len(_EVENT) - 1) :]
        self._end(is_over=self._tail.endswith(b"\n0\r\n\r\n"))

    def _begun(self, data: bytes, now_s: float) -> bytes:
        """Return what there is of the body; nothing while there is none."""
        head, mark, content = data.partition(b"\r\n\r\n")
        if not mark or not content:
            self._tail = data
            return b""
        if not head.startswith(b"HTTP/1.1 200"):
            self._over.set_exception(ValueError(f"port {self._port} answered {data[:300]!r}"))
            return b""
        self._tail = b""
        self._last_s = now_s
        self._seen.first_s.append(now_s - self._sent_s)
        if length := _LENGTH.search(head):
            self._left = int(length[1])
        return content

    def _end(self, *, is_over: bool) -> None:
        if is_over and not self._over.done():
            self._over.set_result(None)


async def rounds(port: int, content: bytes, count: int) -> Seen:
    """Ask again and again on one connection."""
    seen = Seen()
    line = Line(port, content, seen)
    begun_s = time.perf_counter()
    for _ in range(count):
        await line.ask()
    seen.took_s = time.perf_counter() - begun_s
    line.leave()
    return seen


async def crowd(
    port: int, content: bytes, lines: int, seconds: float, apart_s: float = 0.0
) -> Seen:
    """Ask on many connections, again and again for some seconds; let the last answers end.

    Args:
        port: Where to ask.
        content: What to ask.
        lines: How many connections.
        seconds: How long to begin anew where an answer has ended.
        apart_s: Seconds between the first requests of two connections; without them all ask at
            once, and with answers of one length go on doing so.
    """
    seen = Seen()
    begun_s = time.perf_counter()
    until_s = begun_s + seconds

    async def one(number: int) -> None:
        await asyncio.sleep(number * apart_s)
        line = Line(port, content, seen)
        await line.ask()
        while time.perf_counter() < until_s:
            await line.ask()
        line.leave()

    async with asyncio.timeout(seconds + _LOST_TIMEOUT_S), asyncio.TaskGroup() as group:
        for number in range(lines):
            group.create_task(one(number))
    seen.took_s = time.perf_counter() - begun_s
    return seen
