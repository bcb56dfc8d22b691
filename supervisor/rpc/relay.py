"""Relays between an engine and its workers, to measure how long the workers compute.

A relay listens for the engine in place of a worker, on the loopback interface only; it has its port
as soon as it is made. Each connection of the engine has its own connection to the worker. While one
side does not read, the other is not read either, so that no tensor is buffered here. The relay
finds the compute commands in the stream to the worker.

Source: ggml-rpc.cpp. A request is a byte that names the command, the size of its data in 8 bytes,
little-endian, and its data. Commands that compute have no response.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from supervisor.rpc.address import WorkerAddress
from supervisor.rpc.balance import LoadBalancer, ShardMetrics
from supervisor.rpc.shards import ShardPlan
from supervisor.settings.tables import LoadBalanceConfig


class ComputeTimer:
    """Times compute commands, which have no response, by the next response of their connection.

    A worker serves a connection in order, so the response comes when all commands before it are
    done. Several commands were computed one after another, some perhaps before the next one was
    sent. If each takes the same time `s`, the response comes at the maximum over the commands of
    `sent + s * (number of commands from this one on)`; that equation is solved for `s`.
    """

    def __init__(self) -> None:
        self._sent_at_s: deque[float] = deque(maxlen=1024)

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


_LOOPBACK: Final = "127.0.0.1"
_CONNECT_TIMEOUT_S: Final = 10.0
# Larger chunks leave the processor's cache while they are copied.
_BUFFER_MAX_BYTES: Final = 256 * 1024
_US_PER_S: Final = 1_000_000
# A worker serves one connection at a time; a loading engine opens hundreds, one after another.
_CONNECTIONS_MAX: Final = 64


class Relay:
    """Relays the connections between one engine and one worker; `address` is for the engine.

    `on_forward` is called with the latency of each pass, in microseconds.
    """

    def __init__(self, worker: WorkerAddress, on_forward: Callable[[int], None]) -> None:
        self._worker = worker
        self._on_forward = on_forward
        self._open: set[asyncio.Task[None]] = set()
        self._listener = socket.create_server((_LOOPBACK, 0), backlog=_CONNECTIONS_MAX)
        self.address = replace(worker, host=_LOOPBACK, port=self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening. Call this if `serve` was never called."""
        self._listener.close()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        """Serve during the block, and close all connections at its end."""
        server = await asyncio.start_server(
            self._accept, sock=self._listener, limit=_BUFFER_MAX_BYTES
        )
        try:
            yield
        finally:
            server.close()
            for task in self._open:
                task.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _CONNECTIONS_MAX:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._relay(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _relay(
        self, from_engine: asyncio.StreamReader, to_engine: asyncio.StreamWriter
    ) -> None:
        """Connect to the worker, and pass bytes on until one side closes its connection."""
        requests, timer = RequestReader(), ComputeTimer()

        def note_request(chunk: bytes) -> None:
            at_s = time.monotonic()
            for _ in range(requests.feed(chunk)):
                timer.note_command(at_s)

        def note_response(_chunk: bytes) -> None:
            count, each_s = timer.note_response(time.monotonic()) or (0, 0.0)
            for _ in range(count):
                self._on_forward(round(each_s * _US_PER_S))

        async with AsyncExitStack() as stack:
            stack.callback(to_engine.close)
            try:
                async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                    from_worker, to_worker = await asyncio.open_connection(
                        self._worker.host, self._worker.port, limit=_BUFFER_MAX_BYTES
                    )
            except OSError:  # the engine then reports that its worker is gone
                return
            stack.callback(to_worker.close)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            pumps = [
                group.create_task(pump(from_engine, to_worker, note_request)),
                group.create_task(pump(from_worker, to_engine, note_response)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for task in pumps:
                task.cancel()


async def pump(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[bytes], None]
) -> None:
    """Pass chunks on until the end of a stream; each is noted first.

    The other side may take the processor from us once it has the chunk, until it has computed.
    """
    writer.transport.set_write_buffer_limits(high=_BUFFER_MAX_BYTES)
    with suppress(ConnectionError):
        while chunk := await reader.read(_BUFFER_MAX_BYTES):
            note(chunk)
            writer.write(chunk)
            await writer.drain()


class ShardRun:
    """Measures the shards of a run; its relays listen as soon as it is made."""

    def __init__(self, plans: Sequence[ShardPlan], config: LoadBalanceConfig) -> None:
        self.plans = tuple(plans)
        self.balancer = LoadBalancer(config, shards=self._shards)
        self.balancer.register_shards(
            [(plan.worker.name, plan.layers) for plan in plans],
            {plan.worker.name: plan.more_layers for plan in plans},
        )
        record = self.balancer.record
        self._relays = [Relay(plan.worker, partial(record, plan.worker.name)) for plan in plans]

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
        pairs = zip(metrics, self.plans, strict=True)
        return [replace(found, layers_max=plan.layers_max) for found, plan in pairs]
