"""A light load generator: raw connections, one request at a time on each, every arrival timed.

It parses only the first byte, the events and the end of a response: a client that does more
measures itself.
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
class Samples:
    """Timings of some requests.

    Attributes:
        first_s: Seconds from each request to the first byte of its body.
        gap_s: Seconds between consecutive events of a stream.
        responses: Complete responses.
        tokens: Events received.
        duration_s: Seconds of the whole measurement.
    """

    first_s: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    responses: int = 0
    tokens: int = 0
    duration_s: float = 0.0


def body(*, is_stream: bool, tokens: int = 1, pause_us: int = 0, wait_us: int = 0) -> bytes:
    """A chat completion request; `overhead_engine` has the meaning of its members."""
    return (
        b'{"model":"bench","messages":[{"role":"user","content":"hello"}],"stream":%s,'
        b'"max_tokens":%d,"seed":%d%b}'
        % (
            b"true" if is_stream else b"false",
            tokens,
            pause_us,
            b',"user":"%d"' % wait_us if wait_us else b"",
        )
    )


class _Client(asyncio.Protocol):
    def __init__(self, port: int, content: bytes, samples: Samples) -> None:
        self._port = port
        self._samples = samples
        self._transport: asyncio.Transport | None = None
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n"
            b"Content-Type: application/json\r\nAuthorization: Bearer none\r\n"
            b"Accept: */*\r\nUser-Agent: bench\r\nContent-Length: %d\r\n\r\n%b"
            % (port, len(content), content)
        )

    async def request(self) -> None:
        """Send the request and read the whole response."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            await loop.create_connection(lambda: self, "127.0.0.1", self._port)
        self._tail, self._left, self._last_s = b"", -1, 0.0
        self._done: asyncio.Future[None] = loop.create_future()
        self._sent_s = time.perf_counter()
        assert self._transport is not None  # noqa: S101 (connected above)
        self._transport.write(self._request)
        await self._done
        self._samples.responses += 1

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None  # between two requests this is no error
        if not self._done.done():
            self._done.set_exception(exc or ConnectionResetError("closed before its end"))

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        now_s = time.perf_counter()
        if not self._last_s:
            data = self._body_started(self._tail + data, now_s)
            if not data:
                return
        if self._left >= 0:
            self._left -= len(data)
            self._end(is_over=self._left == 0)
            return
        joined = self._tail + data
        # No event is counted twice: the tail is shorter than the start of one.
        if events := joined.count(_EVENT):
            self._samples.tokens += events
            if now_s != self._last_s:
                self._samples.gap_s.append(now_s - self._last_s)
            self._last_s = now_s
        self._tail = joined[-(len(_EVENT) - 1) :]
        self._end(is_over=self._tail.endswith(b"\n0\r\n\r\n"))

    def _body_started(self, data: bytes, now_s: float) -> bytes:
        """The first bytes of the body; empty before they arrive."""
        head, blank, content = data.partition(b"\r\n\r\n")
        if not blank or not content:
            self._tail = data
            return b""
        if not head.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(ValueError(f"port {self._port} answered {data[:300]!r}"))
            return b""
        self._tail = b""
        self._last_s = now_s
        self._samples.first_s.append(now_s - self._sent_s)
        if length := _LENGTH.search(head):
            self._left = int(length[1])
        return content

    def _end(self, *, is_over: bool) -> None:
        if is_over and not self._done.done():
            self._done.set_result(None)


async def sequential(port: int, content: bytes, count: int) -> Samples:
    """Send requests one after another on one connection."""
    samples = Samples()
    client = _Client(port, content, samples)
    started_s = time.perf_counter()
    for _ in range(count):
        await client.request()
    samples.duration_s = time.perf_counter() - started_s
    client.close()
    return samples


async def concurrent(
    port: int, content: bytes, connections: int, seconds: float, stagger_s: float = 0.0
) -> Samples:
    """Send requests on many connections, one after another on each; wait for the last responses.

    Args:
        port: Port of the front.
        content: Body of each request.
        connections: Number of connections.
        seconds: How long a connection sends the next request after a response.
        stagger_s: Seconds between the first requests of two connections; without it responses of
            one length arrive in bursts.
    """
    samples = Samples()
    started_s = time.perf_counter()
    until_s = started_s + seconds

    async def run_client(number: int) -> None:
        await asyncio.sleep(number * stagger_s)
        client = _Client(port, content, samples)
        await client.request()
        while time.perf_counter() < until_s:
            await client.request()
        client.close()

    async with asyncio.timeout(seconds + _LOST_TIMEOUT_S), asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(run_client(number))
    samples.duration_s = time.perf_counter() - started_s
    return samples
