"""One connection of an engine through a relay, and the one to the worker that belongs to it.

While one side does not read, the other is not read either, so that no tensor piles up here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, cast

from supervisor.shards.latency import ComputeTimer
from supervisor.shards.rpc_requests import RequestReader

_CONNECT_TIMEOUT_S: Final = 10.0
_BUFFER_MAX_BYTES: Final = 1024**2
_US_PER_S: Final = 1_000_000

OnForward = Callable[[int], None]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]


class _Side(asyncio.Protocol):
    """One of the two connections; what it receives is written to the other."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass of it
        self.transport.set_write_buffer_limits(high=_BUFFER_MAX_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 (as asyncio calls it)
        self.transport = None
        if self.other and self.other.transport:
            self.other.transport.close()

    def pause_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other and self.other.transport:
            self.other.transport.resume_reading()

    def write(self, chunk: bytes) -> None:
        if self.transport and not self.transport.is_closing():
            self.transport.write(chunk)


class EngineSide(_Side):
    """The connection from the engine; read on once the worker has accepted the other one.

    Args:
        on_forward: Called with the latency of each pass, in microseconds.
        is_open: The connections that are open; this one enters and leaves it.
    """

    def __init__(self, connect: Connect, on_forward: OnForward, is_open: set[EngineSide]) -> None:
        super().__init__()
        self._connect = connect
        self._on_forward = on_forward
        self._is_open = is_open
        self._requests = RequestReader()
        self._timer = ComputeTimer()
        self._early: list[bytes] = []  # what came before the worker accepted; one or two chunks
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._is_open.add(self)
        self._connecting = asyncio.get_running_loop().create_task(self._connect_worker())

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._is_open.discard(self)
        if self._connecting:
            self._connecting.cancel()

    def data_received(self, data: bytes) -> None:
        # Before the worker has them: it may take the processor from us until it has computed. And
        # not by the clock of uvloop, which counts whole milliseconds.
        at_s = time.monotonic()
        if self.other:
            self.other.write(data)
        else:
            self._wait_for_worker(data)
        for _ in range(self._requests.feed(data)):
            self._timer.asked(at_s)

    def _wait_for_worker(self, data: bytes) -> None:
        # Not paused in connection_made, after which uvloop begins to read all the same.
        self._early.append(data)
        if self.transport:
            self.transport.pause_reading()

    def begin(self, worker: _Side) -> None:
        """The worker has accepted."""
        self.other = worker
        worker.write(b"".join(self._early))
        self._early.clear()
        if self.transport:
            self.transport.resume_reading()

    def answered(self) -> None:
        """The worker begins to answer, or goes on."""
        if forwards := self._timer.answered(time.monotonic()):
            for _ in range(forwards.count):
                self._on_forward(round(forwards.each_s * _US_PER_S))

    def abort(self) -> None:
        for side in (self, self.other):
            if side and side.transport:
                side.transport.abort()

    async def _connect_worker(self) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await self._connect(lambda: _WorkerSide(self))
        except OSError:  # the engine then reports that its worker is gone
            self.abort()


class _WorkerSide(_Side):
    """The connection to the worker."""

    def __init__(self, engine: EngineSide) -> None:
        super().__init__()
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.other = self._engine
        self._engine.begin(self)
        if self._engine.transport is None and self.transport:  # it has gone meanwhile
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._engine.answered()
        self._engine.write(data)
