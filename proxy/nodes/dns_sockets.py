"""UDP sockets for dnspython that a cancelled query leaves closed.

Its own are asyncio's datagram endpoints: where a query is cancelled while one is made, uvloop 0.23
waits for it for ever when the loop is closed, and so at the end of a daemon.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from dns._asyncbackend import Backend, DatagramSocket  # what it has of them elsewhere is this
from dns.asyncbackend import get_backend
from dns.exception import Timeout


class DnsSockets(Backend):
    """dnspython's backend for asyncio but for UDP."""

    def __init__(self) -> None:
        self._streams: Any = get_backend("asyncio")

    def name(self) -> str:
        return "asyncio"

    async def make_socket(self, af: int, socktype: int, *rest: Any, **options: Any) -> Any:
        if socktype == socket.SOCK_DGRAM:
            return _UdpSocket(af)
        return await self._streams.make_socket(af, socktype, *rest, **options)

    async def sleep(self, interval: float) -> None:
        await asyncio.sleep(interval)

    def datagram_connection_required(self) -> bool:
        return False

    async def wait_for(self, awaitable: Any, timeout: float | None) -> Any:  # noqa: ASYNC109 (dnspython's)
        return await self._streams.wait_for(awaitable, timeout)


class _UdpSocket(DatagramSocket):
    """A socket for one name server."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_DGRAM)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        self._socket.settimeout(0)

    async def sendto(self, what: bytes, destination: Any, _timeout: float | None) -> int:
        self._socket.connect(destination)
        await asyncio.get_running_loop().sock_sendall(self._socket, what)
        return len(what)

    async def recvfrom(self, size: int, timeout: float | None) -> tuple[bytes, Any]:  # noqa: ASYNC109 (dnspython's)
        try:
            async with asyncio.timeout(timeout):
                wire = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except TimeoutError as error:
            raise Timeout from error
        return wire, self._socket.getpeername()

    async def close(self) -> None:
        self._socket.close()

    async def getpeername(self) -> Any:
        return self._socket.getpeername()

    async def getsockname(self) -> Any:
        return self._socket.getsockname()
