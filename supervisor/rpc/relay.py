"""Relays between an engine and its workers, to measure how long the workers compute.

A relay listens for the engine in place of a worker, on the loopback interface only; it has its port
as soon as it is made. Each connection of the engine has one to the worker. While one side does not
read, the other is not read either, so that no tensor is buffered here. The relay finds the compute
commands in the stream to the worker.

Source: ggml-rpc.cpp. A request is a byte that names the command, the size of its data in 8 bytes,
little-endian, and its data. Commands that compute have no response.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Final, cast

from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.balance import LoadBalancer, ShardMetrics
from supervisor.rpc.shards import ShardPlan
from supervisor.settings.tables import LoadBalanceConfig

_PENDING_MAX: Final = 1024


class ComputeTimer:
    """Times compute commands, which have no response, by the next response of their connection.

    A worker serves a connection in order, so the response comes when all commands before it are
    done. Several commands were computed one after another, some perhaps before the next one was
    sent. If each takes the same time `s`, the response comes at the maximum over the commands of
    `sent + s * (number of commands from this one on)`; that equation is solved for `s`.
    """

    def __init__(self) -> None:
        self._sent_at_s: deque[float] = deque(maxlen=_PENDING_MAX)

    def note_command(self, at_s: float) -> None:
        self._sent_at_s.append(at_s)

    def note_response(self, at_s: float) -> tuple[int, float] | None:
        """Note the begin of a response; return the commands before it, and the seconds of each."""
        if not self._sent_at_s:
            return None
        count = len(self._sent_at_s)
        each_s = min(
            (at_s - sent_s) / (count - number) for number, sent_s in enumerate(self._sent_at_s)
        )
        self._sent_at_s.clear()
        return count, each_s


# GRAPH_COMPUTE brings a graph, GRAPH_RECOMPUTE repeats the last one.
_COMPUTE: Final = frozenset({10, 16})
_HEADER_BYTES: Final = 9


class RequestReader:
    """Parses requests in chunks of any size; buffers at most a header."""

    def __init__(self) -> None:
        self._header = b""
        self._data_left = 0

    def feed(self, chunk: bytes) -> int:
        """Return how many compute commands end in a chunk."""
        at, computes = 0, 0
        while at < len(chunk) or self._is_at_end:
            if self._is_at_end:
                computes += self._header[0] in _COMPUTE
                self._header = b""
            else:
                at += self._take(chunk, at)
        return computes

    @property
    def _is_at_end(self) -> bool:
        return len(self._header) == _HEADER_BYTES and not self._data_left

    def _take(self, chunk: bytes, at: int) -> int:
        """Take the rest of a header or of data; return the number of bytes."""
        if self._data_left:
            taken = min(self._data_left, len(chunk) - at)
            self._data_left -= taken
            return taken
        part = chunk[at : at + _HEADER_BYTES - len(self._header)]
        self._header += part
        if len(self._header) == _HEADER_BYTES:
            self._data_left = int.from_bytes(self._header[1:], "little")
        return len(part)


_CONNECT_TIMEOUT_S: Final = 10.0
_BUFFER_MAX_BYTES: Final = 1024**2
_US_PER_S: Final = 1_000_000

OnForward = Callable[[int], None]
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[None]]


class _Side(asyncio.Protocol):
    """One of two connections; each writes its received data to the other."""

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
    """The connection from the engine; reading pauses until the worker has accepted the other one.

    `on_forward` is called with the latency of each pass, in microseconds. The connection adds
    itself to `is_open` and removes itself.
    """

    def __init__(self, connect: Connect, on_forward: OnForward, is_open: set[EngineSide]) -> None:
        super().__init__()
        self._connect = connect
        self._on_forward = on_forward
        self._is_open = is_open
        self._requests = RequestReader()
        self._timer = ComputeTimer()
        self._early: list[bytes] = []  # one or two chunks received before the worker accepted
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
        # The time before the worker gets the data, as it may take the processor from us until it
        # has computed. The clock of uvloop counts only whole milliseconds.
        at_s = time.monotonic()
        if self.other:
            self.other.write(data)
        else:
            # Pausing in connection_made would have no effect: uvloop begins to read after it.
            self._early.append(data)
            if self.transport:
                self.transport.pause_reading()
        for _ in range(self._requests.feed(data)):
            self._timer.note_command(at_s)

    def begin(self, worker: _Side) -> None:
        self.other = worker
        worker.write(b"".join(self._early))
        self._early.clear()
        if self.transport:
            self.transport.resume_reading()

    def note_response(self) -> None:
        """Note that the worker begins or continues a response."""
        count, each_s = self._timer.note_response(time.monotonic()) or (0, 0.0)
        for _ in range(count):
            self._on_forward(round(each_s * _US_PER_S))

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
    def __init__(self, engine: EngineSide) -> None:
        super().__init__()
        self._engine = engine

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.other = self._engine
        self._engine.begin(self)
        if self._engine.transport is None and self.transport:  # the engine has disconnected
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._engine.note_response()
        self._engine.write(data)


_LOOPBACK: Final = "127.0.0.1"
# A worker serves one connection at a time; a loading engine opens hundreds, one after another.
_CONNECTIONS_MAX: Final = 64


class Relay:
    """Relays the connections between one engine and one worker; `address` is for the engine.

    `on_forward` is called with the latency of each pass, in microseconds.
    """

    def __init__(self, worker: WorkerAddress, on_forward: OnForward) -> None:
        self._worker = worker
        self._on_forward = on_forward
        self._open: set[EngineSide] = set()
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=_CONNECTIONS_MAX)
        self.address = replace(worker, host=_LOOPBACK, port=self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening. Call this if `serve` was never called."""
        self._listener.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Serve during the block, and close all connections at its end."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self._protocol, sock=self._listener)
        try:
            yield
        finally:
            server.close()
            for transport in tuple(self._open):
                transport.abort()

    def _protocol(self) -> asyncio.Protocol:
        is_full = len(self._open) >= _CONNECTIONS_MAX
        return _Refused() if is_full else EngineSide(self._connect, self._on_forward, self._open)

    async def _connect(self, make: Callable[[], asyncio.Protocol]) -> None:
        loop, worker = asyncio.get_running_loop(), self._worker
        await loop.create_connection(make, worker.host, worker.port)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class ShardRun:
    """Measures the shards of a run; its relays listen as soon as it is made."""

    def __init__(self, plans: Sequence[ShardPlan], config: LoadBalanceConfig) -> None:
        self.plans = tuple(plans)
        self.balancer = LoadBalancer(config, shards=self._shards)
        self.balancer.register_shards(
            [(plan.worker.name, plan.layers) for plan in plans],
            {plan.worker.name: plan.more_layers for plan in plans},
        )
        self._relays = [
            Relay(plan.worker, functools.partial(self.balancer.record, plan.worker.name))
            for plan in plans
        ]

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """The addresses of the workers for the engine, in their order."""
        return tuple(relay.address for relay in self._relays)

    def close(self) -> None:
        """Stop listening. Call this if `serve` was never called."""
        for relay in self._relays:
            relay.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for relay in self._relays:
                await stack.enter_async_context(relay.serve())
            yield

    def _shards(self, metrics: Sequence[ShardMetrics]) -> list[ShardMetrics]:
        return [
            replace(found, layers_max=plan.layers_max)
            for found, plan in zip(metrics, self.plans, strict=True)
        ]
