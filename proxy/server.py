"""The listening server: start, drain, close, on a TCP port or on a service manager's sockets."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Final

from aiohttp import web

from proxy.app import App
from proxy.common.toml_types import host_of, port_of
from proxy.errors import Draining, ListenFailed
from proxy.http.connections import Connection, Handshakes
from proxy.http.middleware import Handler
from proxy.http.tls import listener_context

# Time for responses that clients do not read, after all requests have ended.
_SHUTDOWN_TIMEOUT_S: Final = 0.1
_LINGERING_S: Final = 2.0
_BACKLOG_MAX: Final = 1024
_MAX_HEADER_LINE_BYTES: Final = 16 * 1024
_MAX_HEADERS: Final = 128
# Time for a client that was connected before a drain to send a request.
_LAST_REQUEST_S: Final = 1.0
# About twice as many bytes of an unread body are buffered.
_READ_BYTES: Final = 64 * 1024
# TCP probes begin after this much silence, then come every quarter of it.
_ALIVE_S: Final = 60
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (read, not bound)


def tune_gc() -> None:
    """Collect cyclic garbage less often, because requests leave almost none.

    For a process that only serves; existing objects, such as modules, are never scanned again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


class Server:
    """Serves the addresses of an `App`; `port` is set once started.

    `sockets` already listen and outlive this process: while it drains, new connections wait in them
    for the next process, and requests on open connections are answered.
    """

    def __init__(
        self, app: App, sockets: Sequence[socket.socket] = (), *, idle_timeout_s: float = 75.0
    ) -> None:
        self._settings = settings = app.core.settings
        self._idle_timeout_s = idle_timeout_s
        self._sockets = sockets
        self.port = settings.port
        self._app = app
        self._server_state = app.core.server_state
        self._drain_timeout: asyncio.Timeout | None = None
        self._managers: list[web.Server] = []
        self._listeners: list[asyncio.Server] = []
        self._handshakes: list[Handshakes] = []
        # Clients' errors are not logged, because a port scan could fill the log.
        logger = logging.getLogger("proxy.http")
        logger.addFilter(_is_our_fault)
        self._logger = logger

    @property
    def listen(self) -> str:
        return self._settings.listen

    @property
    def url(self) -> str:
        """The server's URL on this machine, once it has started."""
        host = _ANY_ADDRESS.get(self._settings.host, self._settings.host)
        scheme = "https" if self._app.tls else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Begin to listen; raises ListenFailed."""
        host, port = self._settings.host, self._settings.port
        await self._app.prepare()
        try:
            await self._start(self._app.handle, host, port, self._sockets)
            for address, handle in self._app.handlers:
                host, port = host_of(address), port_of(address)
                await self._start(handle, host, port, ())
        except OSError as error:
            self._stop_listening()
            self._app.close()
            reason, hint = _explain(error)
            raise ListenFailed(f"cannot listen on {host}:{port}: {reason}", hint) from error
        listening = [sock for listener in self._listeners for sock in listener.sockets]
        for sock in listening:
            _detect_dead_clients(sock, self._settings.client_write_timeout_s)
        self.port = int(listening[0].getsockname()[1])
        self._server_state.url = self.url

    async def _start(
        self, handle: Handler, host: str, port: int, sockets: Sequence[socket.socket]
    ) -> None:
        # Without cancellation, a handler would continue after its client has disconnected.
        manager = web.Server(handle, handler_cancellation=True)
        listen = functools.partial(
            asyncio.get_running_loop().create_server,
            self._accept(functools.partial(self._make_connection, manager)),
            # The loop accepts the whole queue in one step, before it can reject any connection, so
            # the queue must fit into the remaining file descriptors.
            backlog=min(_BACKLOG_MAX, max(16, self._app.connections.limit // 2)),
        )
        if sockets:
            self._listeners += [await listen(sock=sock) for sock in sockets]
        else:
            self._listeners.append(await listen(host, port))
        self._managers.append(manager)

    async def serve(self) -> None:
        """Run background work until cancelled, which must happen before `drain`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._app.run())
            process, emit = self._server_state.process, self._app.core.metrics.emit
            if self._settings.announce:
                # Imported here, because most daemons do not use it and save its memory.
                from proxy.nodes import mdns  # noqa: PLC0415

                group.create_task(mdns.announce(self._settings.host, self.port, process, emit))
            if directory := self._settings.announce_in:
                from proxy.nodes import files  # noqa: PLC0415 (as above)

                target = files.target_of(self._settings.host, self.port)
                group.create_task(files.announce(directory, target, process, emit))

    async def drain(self, timeout_s: float) -> None:
        """Let in-flight requests finish for `timeout_s`, then abort them.

        New requests get 503, which tells other machines to send no more. Sockets that outlive this
        process are left to the next process instead. A second call during the first can only
        shorten the wait.
        """
        if self._sockets and self._drain_timeout is None:
            self._stop_listening()
            self._app.connections.begin_closing()
        else:
            self._server_state.is_draining = True
        if self._drain_timeout is not None:
            self._shorten(timeout_s)
            await self._server_state.in_flight.wait_empty()
            return
        try:
            async with asyncio.timeout(timeout_s) as self._drain_timeout:
                if self._sockets:
                    await self._last_requests()
                await self._server_state.in_flight.wait_empty()
        except TimeoutError:
            await self._cut()

    async def _last_requests(self) -> None:
        """Wait until every open connection had time for its last request."""
        connections, in_flight = self._app.connections, self._server_state.in_flight
        await asyncio.sleep(0)  # let connections that were just accepted begin
        before = -1
        while len(connections) and (len(in_flight) or connections.requests != before):
            before = connections.requests
            await in_flight.wait_empty()
            await asyncio.sleep(_LAST_REQUEST_S)

    async def close(self) -> None:
        """Abort in-flight requests and close every connection."""
        self._server_state.is_draining = True
        self._stop_listening()
        self._server_state.watching.abort(Draining("the server stopped"))
        await self._cut()
        for handshakes in self._handshakes:
            await handshakes.close()
        await asyncio.sleep(0)  # requests that were just received begin before they are aborted
        for manager in self._managers:
            manager.pre_shutdown()
            await manager.shutdown(_SHUTDOWN_TIMEOUT_S)
        self._app.close()

    def _accept(self, make: Callable[[], Connection]) -> Callable[[], asyncio.Protocol]:
        if self._app.tls is None:
            return make
        handshakes = Handshakes(
            self._app.connections,
            listener_context(self._app.tls),
            make,
            timeout_s=self._settings.header_timeout_s,
            shutdown_timeout_s=_LINGERING_S,
        )
        self._handshakes.append(handshakes)
        return handshakes.accept

    def _make_connection(self, manager: web.Server) -> Connection:
        return Connection(
            manager,
            loop=asyncio.get_running_loop(),
            connections=self._app.connections,
            header_timeout_s=self._settings.header_timeout_s,
            head_max_bytes=self._settings.max_header_total_bytes,
            access_log=None,
            auto_decompress=False,  # `proxy.http.body` decompresses, within limits
            logger=self._logger,
            keepalive_timeout=self._idle_timeout_s,
            lingering_time=_LINGERING_S,
            read_bufsize=_READ_BYTES,
            max_line_size=_MAX_HEADER_LINE_BYTES,
            max_field_size=_MAX_HEADER_LINE_BYTES,
            max_headers=_MAX_HEADERS,
        )

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _shorten(self, timeout_s: float) -> None:
        timeout = self._drain_timeout
        until_s = asyncio.get_running_loop().time() + timeout_s
        is_waiting = (
            timeout is not None and not timeout.expired() and len(self._server_state.in_flight)
        )
        if timeout is not None and is_waiting and until_s < (timeout.when() or 0):
            timeout.reschedule(until_s)

    async def _cut(self) -> None:
        self._server_state.in_flight.abort(
            Draining("the server stopped before the response was complete")
        )
        await self._server_state.in_flight.wait_empty()


def _explain(error: OSError) -> tuple[str, str]:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use", "stop its program, or set another listen under [proxy]"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "not permitted", "ports below 1024 belong to root; set another listen under [proxy]"
    return error.strerror or str(error), "set an address of this machine as listen under [proxy]"


def _detect_dead_clients(listening: socket.socket, client_write_timeout_s: float) -> None:
    """Have the kernel detect dead clients, and clients that read nothing for the timeout.

    Accepted connections inherit the options. A broken connection wakes the task that writes to it.
    Source: Linux, tcp(7).
    """
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _ALIVE_S),
        ("TCP_KEEPINTVL", _ALIVE_S // 4),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", int(client_write_timeout_s * 1000)),
    ):
        if option := getattr(socket, name, None):  # some systems lack some options
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


def _is_our_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    # A ConnectionError is a client that disconnected, even before 100 Continue; an instance's has
    # become another error.
    return not isinstance(error, web.RequestPayloadError | ConnectionError)
