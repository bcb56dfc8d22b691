"""One connection to an instance that carries one request and its answer.

An answer that nobody reads stays where it is: past 64 KiB, and what one read of the socket brings,
nothing more is taken from the connection. All changes happen in methods without `await`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from proxy.upstream.http1 import InvalidResponse, Response

_HELD_MAX_BYTES: Final = 64 * 1024
# Up to here one packet for head and body costs less than two; above, a copy of the body costs more.
_JOINED_MAX_BYTES: Final = 64 * 1024

# Passes bytes of a body on where they go; False, with nothing done, where they have to wait.
OnChunk = Callable[[bytes], bool]


class ConnectionBroken(Exception):
    """The connection ended, or what came on it is no answer.

    Attributes:
        is_malformed: Whether the bytes are to blame, and not the end of them.
    """

    def __init__(self, what: str, *, is_malformed: bool = False) -> None:
        super().__init__(what)
        self.is_malformed = is_malformed


class ReadTimeout(Exception):
    """Nothing came for too long while it was waited for."""


class UpstreamConnection(asyncio.Protocol):
    """The connection; connected by asyncio, used by one task.

    Attributes:
        response: What has come of the answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, method: str, silence_s: float) -> None:
        """Make it, not yet connected.

        Args:
            loop: The running loop.
            method: Method of the request: it decides whether an answer has a body.
            silence_s: Seconds to wait for the next bytes, above 0.
        """
        self.response = Response(method)
        self._loop = loop
        self._silence_s = silence_s
        self._request: tuple[bytes, ...] = ()
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._take: OnChunk | None = None
        self._is_paused = False
        self._failure: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waiting_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_read(self) -> bool:
        """Return whether the whole body was read."""
        return self.response.is_over and not self._held

    def send(self, head: bytes, body: bytes) -> None:
        """Have the request sent once the connection is there, in that very step of the loop.

        The transport holds what the instance does not take at once.
        """
        self._request = (head + body,) if len(body) <= _JOINED_MAX_BYTES else (head, body)

    async def response_started(self) -> None:
        """Wait until the head of the answer is there.

        Raises:
            Silent: It did not come in time.
            Broken: It will not come.
        """
        while not self.response.status:
            await self._change()

    async def read(self, take: OnChunk | None = None) -> bytes:
        """Return the next bytes of the body, all there are; empty at its end.

        Args:
            take: Is given what comes meanwhile, the body's last bytes excepted, in the step of the
                loop in which it comes; only what it does not take is returned.

        Raises:
            Silent: Nothing came in time.
            Broken: The body will not be complete.
        """
        self._take = take
        try:
            while not self._held:
                if self.response.is_over:
                    return b""
                await self._change()
        finally:
            self._take = None
        held = self._held
        body = held[0] if len(held) == 1 else b"".join(held)
        self._held, self._held_bytes = [], 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body

    def close(self) -> None:
        """Close the connection at once, whatever is still on its way."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be connected."""
        self._transport = cast("asyncio.Transport", transport)
        for part in self._request:
            self._transport.write(part)
        self._request = ()
        self._timer = self._loop.call_later(self._silence_s, self._look)

    def data_received(self, data: bytes) -> None:
        """Take what the instance sent."""
        if self._failure is not None:
            return
        try:
            body = self.response.feed(data)
        except InvalidResponse as error:
            self._fail(ConnectionBroken(str(error), is_malformed=True))
            return
        if self.response.is_over:
            self.close()
        elif body and self._is_taken(body):
            self._waiting_since_s = self._loop.time()
            return
        if body:
            self._hold(body)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Be disconnected."""
        self.close()
        self._transport = None
        if self._failure is None and not self.response.end():
            self._fail(ConnectionBroken(str(exc or "the connection was closed")))
        self._wake()

    # What is behind them.

    def _is_taken(self, body: bytes) -> bool:
        return self._take is not None and not self._held and self._take(body)

    def _hold(self, body: bytes) -> None:
        self._held.append(body)
        self._held_bytes += len(body)
        if self._held_bytes > _HELD_MAX_BYTES and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def _fail(self, failure: Exception) -> None:
        self._failure = self._failure or failure
        self.close()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _change(self) -> None:
        """Wait until something has come, or nothing can come any more."""
        if self._failure is not None:
            raise self._failure
        self._waiting_since_s = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        """Fail if the instance is silent; one timer, moved on, costs nothing per chunk."""
        now_s = self._loop.time()
        since_s = now_s if self._waiter is None else self._waiting_since_s
        if now_s - since_s >= self._silence_s:
            self._fail(ReadTimeout())
        else:
            self._timer = self._loop.call_at(since_s + self._silence_s, self._look)
