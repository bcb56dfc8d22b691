"""One connection to an instance, for one request and its response.

Back-pressure: with more than 64 KiB unread, the socket is not read. State changes only in methods
without `await`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from proxy.upstream.http1 import InvalidResponse, Response
from proxy.upstream.tls_refusal import tls_refusal

_HELD_MAX_BYTES: Final = 64 * 1024
# Up to this size, one packet costs less than two; above it, the copy of the body costs more.
_JOINED_MAX_BYTES: Final = 64 * 1024

# Consumes bytes of a body; False if it cannot now, and then it has done nothing.
OnChunk = Callable[[bytes], bool]


class ConnectionBroken(Exception):
    """The connection ended early, or (`is_malformed`) its bytes are not an HTTP response.

    `tls_refusal`: why, where the other side has ended TLS.
    """

    def __init__(
        self, reason: str, *, is_malformed: bool = False, tls_refusal: str | None = None
    ) -> None:
        super().__init__(reason)
        self.is_malformed = is_malformed
        self.tls_refusal = tls_refusal


class ReadTimeout(Exception):
    """No bytes arrived in time."""


class UpstreamConnection(asyncio.Protocol):
    """Used by one task."""

    def __init__(self, loop: asyncio.AbstractEventLoop, method: str, silence_s: float) -> None:
        # `silence_s`: seconds to wait for the next bytes.
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
        return self.response.is_over and not self._held

    def send(self, head: bytes, body: bytes) -> None:
        """Send the request in the loop step that connects."""
        self._request = (head + body,) if len(body) <= _JOINED_MAX_BYTES else (head, body)

    async def response_started(self) -> None:
        """Wait for the response header. Raises ReadTimeout, ConnectionBroken."""
        while not self.response.status:
            await self._change()

    async def read(self, take: OnChunk | None = None) -> bytes:
        """All bytes of the body that have arrived; empty at its end.

        Args:
            take: Gets bytes that arrive meanwhile, except the body's last ones, in the loop step in
                which they arrive; only bytes that it does not consume are returned.

        Raises:
            ReadTimeout: No bytes arrived in time.
            ConnectionBroken: The body will not be complete.
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
        """Abort the connection."""
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        for part in self._request:
            self._transport.write(part)
        self._request = ()
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)

    def data_received(self, data: bytes) -> None:
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
        self.close()
        self._transport = None
        if self._failure is None and not self.response.end():
            reason = str(exc or "the connection was closed")
            self._fail(ConnectionBroken(reason, tls_refusal=tls_refusal(exc)))
        self._wake()

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
        """Wait for bytes or the end of the connection."""
        if self._failure is not None:
            raise self._failure
        self._waiting_since_s = self._loop.time()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check_silence(self) -> None:
        # One timer that is moved on, not restarted per chunk.
        now_s = self._loop.time()
        since_s = now_s if self._waiter is None else self._waiting_since_s
        if now_s - since_s >= self._silence_s:
            self._fail(ReadTimeout())
        else:
            self._timer = self._loop.call_at(since_s + self._silence_s, self._check_silence)
