"""What a client that asked for a stream hears while nothing comes for it yet.

A request may wait long: in line, for a model to load, while its prompt is computed. Clients and
the proxies on their way give up on an answer that does not begin. So after two seconds the answer
begins, and every few seconds a comment follows, which their libraries read over. From then on a
failure can no longer be a status: it comes as an event.

Nothing is begun for a request that is answered at once but one timer.

Source: WHATWG HTML, section "Authoring notes" of server-sent events, on comments as keep-alives;
Anthropic's streaming API, event `ping`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from typing import Final

from proxy.endpoints import EndpointKind
from proxy.errors import ProxyError
from proxy.forward.client_response import ClientResponse

FIRST_PING_S: Final = 2.0
INTERVAL_S: Final = 10.0

_COMMENT: Final = b":\n\n"
_ANTHROPIC_PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'


class KeepAlive:
    """One request's wait."""

    def __init__(
        self, group: asyncio.TaskGroup, client_response: ClientResponse, ping: bytes
    ) -> None:
        self._group = group
        self._client_response = client_response
        self._ping = ping
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(FIRST_PING_S, self._begin)

    async def stop(self) -> None:
        """Say nothing from now on; return when nothing is half said."""
        self._timer.cancel()
        self._over.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """Say nothing from now on, whatever is half said."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = self._group.create_task(self._send_comments())

    async def _send_comments(self) -> None:
        # A client that left ends its request by itself.
        with suppress(ConnectionError):
            while not self._over.is_set():
                await self._client_response.send_keepalive(self._ping)
                with suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._over.wait()


def keep_alive(
    client_response: ClientResponse, ping: bytes | None
) -> AbstractAsyncContextManager[None]:
    """Keep a client awake until its answer begins, or the block ends.

    Args:
        client_response: What the client gets.
        ping: What it reads over, from `ping_for`; None where it asked for no stream.
    """
    return nullcontext() if ping is None else _kept_alive(client_response, ping)


@asynccontextmanager
async def _kept_alive(client_response: ClientResponse, ping: bytes) -> AsyncIterator[None]:
    failure: ProxyError | ConnectionError | None = None
    async with asyncio.TaskGroup() as group:
        wait = KeepAlive(group, client_response, ping)
        client_response.stop_keepalive = wait.stop
        try:
            yield
        except (ProxyError, ConnectionError) as error:
            failure = error  # as it is: a task group would wrap it up
        finally:
            wait.cancel()
            client_response.stop_keepalive = None  # else each would keep the other
    if failure is not None:
        raise failure


def ping_for(kind: EndpointKind) -> bytes:
    """Return what clients of a page read over."""
    return _ANTHROPIC_PING if kind is EndpointKind.MESSAGES else _COMMENT
