"""Stands between an engine and a worker, and times what the worker computes.

Finds the compute commands in what an engine sends to a worker.

Source: ggml-rpc.cpp. A request is a byte that names the command, the size of its data in 8 bytes,
little-endian, and its data. Commands that compute have no response.

One connection of an engine through a relay, and the one to the worker that belongs to it. While one
side does not read, the other is not read either, so that no tensor piles up here.

Listens for an engine in place of a worker, and times what the worker computes. It listens on the
loopback interface only, and has its port as soon as it is made.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final, cast

from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.balance import LoadBalancer, Shard, ShardMetrics
from supervisor.rpc.shards import ShardPlan
from supervisor.settings.tables import LoadBalanceConfig

_PENDING_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Forwards:
    """Passes that a worker has computed, and the time of each."""

    count: int
    each_s: float


class ComputeTimer:
    """Times compute commands, which have no response, by the next response of their connection.

    A worker serves a connection in order, so that response comes once all commands before it are
    done. Several of them were computed one after another, some perhaps while the next one was still
    to come: with equal times `s`, the response comes at the latest of `asked + s * (those from that
    one on)`, and that is solved for `s`.
    """

    def __init__(self) -> None:
        self._asked_at_s: deque[float] = deque(maxlen=_PENDING_MAX)

    def asked(self, at_s: float) -> None:
        """A compute command was sent."""
        self._asked_at_s.append(at_s)

    def answered(self, at_s: float) -> Forwards | None:
        """A response begins; return what was computed before it."""
        if not self._asked_at_s:
            return None
        count = len(self._asked_at_s)
        each_s = min(
            (at_s - asked_s) / (count - number) for number, asked_s in enumerate(self._asked_at_s)
        )
        self._asked_at_s.clear()
        return Forwards(count, each_s)


# GRAPH_COMPUTE brings a graph, GRAPH_RECOMPUTE repeats the last one.
_COMPUTE: Final = frozenset({10, 16})
_HEADER_BYTES: Final = 9


class RequestReader:
    """Follows requests through chunks of any size; keeps at most a header."""

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
        """Take the rest of a header, or data; return how many bytes."""
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
            # Not paused in connection_made, after which uvloop begins to read all the same.
            self._early.append(data)
            if self.transport:
                self.transport.pause_reading()
        for _ in range(self._requests.feed(data)):
            self._timer.asked(at_s)

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


_LOOPBACK: Final = "127.0.0.1"
# A worker serves one connection at a time; an engine that loads opens hundreds, one by one.
_CONNECTIONS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int


class Relay:
    """Passes the bytes between one engine and one worker on.

    Args:
        on_forward: Called with the latency of each pass, in microseconds.
    """

    def __init__(self, worker: Address, on_forward: OnForward) -> None:
        self._worker = worker
        self._on_forward = on_forward
        self._open: set[EngineSide] = set()
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=_CONNECTIONS_MAX)
        self.address = Address(_LOOPBACK, self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening, if it was not served."""
        self._listener.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Serve for the length of the block, and close all connections at its end."""
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
    """Measures the shards of a run; listens in place of the workers as soon as it is made."""

    def __init__(self, plans: Sequence[ShardPlan], config: LoadBalanceConfig) -> None:
        self.plans = tuple(plans)
        self.balancer = LoadBalancer(config, shards=self._shards)
        self.balancer.register_shards(
            [(plan.worker.name, plan.layers) for plan in plans],
            {plan.worker.name: plan.more_layers for plan in plans},
        )
        self._relays = [self._relay(plan.worker) for plan in plans]

    @property
    def addresses(self) -> tuple[WorkerAddress, ...]:
        """Where the engine reaches the workers, in their order."""
        pairs = zip(self.plans, self._relays, strict=True)
        return tuple(
            replace(plan.worker, host=relay.address.host, port=relay.address.port)
            for plan, relay in pairs
        )

    def close(self) -> None:
        """Stop listening, if it was not served."""
        for relay in self._relays:
            relay.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Relay for the length of the block."""
        async with AsyncExitStack() as stack:
            for relay in self._relays:
                await stack.enter_async_context(relay.serve())
            yield

    def _relay(self, worker: WorkerAddress) -> Relay:
        def on_forward(latency_us: int) -> None:
            self.balancer.record(worker.name, latency_us)

        return Relay(Address(worker.host, worker.port), on_forward)

    def _shards(self, metrics: Sequence[ShardMetrics]) -> list[Shard]:
        return [
            Shard(found, plan.layers_max) for found, plan in zip(metrics, self.plans, strict=True)
        ]
