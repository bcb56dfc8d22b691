"""TLS handshakes of clients: their connections count towards the limit from accept on.

The loops tell a protocol of a connection only after its handshake, so they accept it without TLS,
and it is upgraded here.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import cast

from proxy.connections import Closable, Connections
from proxy.errors import ProxyError


class Handshakes:
    """`accept` is for `create_server`; `make` returns the protocol of a finished handshake."""

    def __init__(
        self,
        connections: Connections[Hashable],
        context: ssl.SSLContext,
        make: Callable[[], asyncio.Protocol],
        *,
        timeout_s: float,
        shutdown_timeout_s: float,
    ) -> None:
        self._connections = connections
        self._context = context
        self._make = make
        self._timeout_s = timeout_s
        self._shutdown_timeout_s = shutdown_timeout_s
        self._running: dict[asyncio.Task[None], _Accepted] = {}
        self._is_closed = False

    def accept(self) -> asyncio.Protocol:
        return _Accepted(self)

    def begin(self, accepted: _Accepted) -> None:
        """Count the connection and start its handshake, or close it without a reason."""
        if self._is_closed:
            accepted.give_way()
            return
        try:
            outgoing = self._connections.add(accepted)
        except ProxyError:  # a client reads no HTTP before the handshake
            accepted.give_way()
            return
        if isinstance(outgoing, Closable):
            outgoing.give_way()
        task = asyncio.get_running_loop().create_task(self._run(accepted))
        self._running[task] = accepted
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Abort handshakes, also those of connections that are accepted from now on."""
        self._is_closed = True
        for accepted in self._running.values():
            accepted.give_way()
        if self._running:
            await asyncio.wait(tuple(self._running))

    async def _run(self, accepted: _Accepted) -> None:
        early = _Early()
        transport = None
        try:
            with suppress(OSError):  # the client's refusal or silence
                transport = await self._upgrade(accepted, early)
        finally:
            self._connections.remove(accepted)
            if transport is None or transport.is_closing():
                accepted.give_way()
        if transport is not None and not transport.is_closing():
            early.hand_over(transport, self._make())

    async def _upgrade(self, accepted: _Accepted, early: _Early) -> asyncio.Transport | None:
        """Return None if the connection is closed, which `start_tls` does not raise for."""
        if accepted.transport.is_closing():
            return None
        loop = asyncio.get_running_loop()
        loop.call_soon(accepted.pass_on)  # before `start_tls` begins the handshake
        return await loop.start_tls(
            accepted.transport,
            early,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._timeout_s,
            ssl_shutdown_timeout=self._shutdown_timeout_s,
        )


class _Accepted(asyncio.Protocol):
    """Without TLS: until `start_tls` has replaced it."""

    transport: asyncio.Transport

    def __init__(self, handshakes: Handshakes) -> None:
        self._handshakes = handshakes
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._handshakes.begin(self)

    def data_received(self, data: bytes) -> None:
        """Keep what uvloop reads before the next step of the loop; `start_tls` resumes reading."""
        self._data += data
        self.transport.pause_reading()

    def pass_on(self) -> None:
        """Give it to the protocol of TLS, which keeps it until its handshake begins."""
        if self._data and (current := self.transport.get_protocol()) is not self:
            protocol = cast("asyncio.BufferedProtocol", current)
            memoryview(protocol.get_buffer(len(self._data)))[: len(self._data)] = self._data
            protocol.buffer_updated(len(self._data))

    def give_way(self) -> None:
        self.transport.abort()


class _Early(asyncio.Protocol):
    """Keeps what asyncio delivers before the caller of `start_tls` goes on: one read at most."""

    def __init__(self) -> None:
        self._data = b""

    def data_received(self, data: bytes) -> None:
        self._data += data

    def hand_over(self, transport: asyncio.Transport, protocol: asyncio.Protocol) -> None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(self._data)
