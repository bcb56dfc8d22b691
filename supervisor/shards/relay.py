"""Listens for an engine in place of a worker, and times what the worker computes.

It listens on the loopback interface only, and has its port as soon as it is made.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from supervisor.shards.relay_connection import EngineSide, OnForward

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
            for one in tuple(self._open):
                one.abort()

    def _protocol(self) -> asyncio.Protocol:
        is_full = len(self._open) >= _CONNECTIONS_MAX
        return _Refused() if is_full else EngineSide(self._connect, self._on_forward, self._open)

    async def _connect(self, make: Callable[[], asyncio.Protocol]) -> None:
        loop, worker = asyncio.get_running_loop(), self._worker
        await loop.create_connection(make, worker.host, worker.port)


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
