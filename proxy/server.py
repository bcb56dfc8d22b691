"""The proxy on a TCP port: start, drain, close; the same in tests and in production."""

from __future__ import annotations

import asyncio
import errno
import logging
from typing import Final

from aiohttp import http_exceptions, web

from proxy.app import FLOOR
from proxy.errors import Draining, ListenFailed
from proxy.settings import ProxySettings

# Only for what is left when every request is over: half-sent answers that nobody reads.
_SHUTDOWN_TIMEOUT_S: Final = 0.1
_LINGERING_S: Final = 2.0
_BACKLOG: Final = 1024
_ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (read, not bound)


class Server:
    """Serves an application built by `proxy.app.build_app`.

    Attributes:
        port: The TCP port that is listened on, once it has started.
    """

    def __init__(self, app: web.Application, settings: ProxySettings) -> None:
        self._settings = settings
        self.port = settings.port
        self._floor = app[FLOOR]
        self._patience: asyncio.Timeout | None = None
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_quiet_logger(),
            # Without it a handler runs on after its client has left.
            handler_cancellation=True,
            keepalive_timeout=settings.idle_timeout_s,
            lingering_time=_LINGERING_S,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )

    @property
    def url(self) -> str:
        """Where this machine reaches the server, once it has started."""
        host = _ANY_ADDRESS.get(self._settings.host, self._settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen.

        Raises:
            ListenFailed: The address is taken, not ours, or not allowed.
        """
        host, port = self._settings.host, self._settings.port
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=_BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise ListenFailed(host, port, *_explain(error)) from error
        self.port = int(self._runner.addresses[0][1])

    async def drain(self, timeout_s: float) -> None:
        """Take nothing more, let what runs finish, then cut the rest.

        Connections that are open are answered 503 from now on. A second call, made while the first
        one waits, may shorten the wait but not lengthen it.

        Args:
            timeout_s: Seconds that running requests get, at least 0.
        """
        self._floor.is_shut = True
        for site in self._runner.sites:
            await site.stop()
        if self._patience is not None:
            self._shorten(timeout_s)
            await self._floor.flights.idle()
            return
        try:
            async with asyncio.timeout(timeout_s) as self._patience:
                await self._floor.flights.idle()
        except TimeoutError:
            await self._cut()

    async def close(self) -> None:
        """Cut what runs and close every connection; at once where nothing runs."""
        self._floor.is_shut = True
        await self._cut()
        await self._runner.cleanup()

    def _shorten(self, timeout_s: float) -> None:
        patience = self._patience
        until_s = asyncio.get_running_loop().time() + timeout_s
        is_waiting = patience is not None and not patience.expired() and len(self._floor.flights)
        if patience is not None and is_waiting and until_s < (patience.when() or 0):
            patience.reschedule(until_s)

    async def _cut(self) -> None:
        self._floor.flights.cut(Draining("the server stopped before the answer was complete"))
        await self._floor.flights.idle()


def _explain(error: OSError) -> tuple[str, str]:
    """Return what is wrong with an address, and what to do next."""
    if error.errno == errno.EADDRINUSE:
        return "the port is in use", "stop what uses it, or set another listen under [proxy]"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "not permitted", "ports below 1024 belong to root; set another listen under [proxy]"
    return error.strerror or str(error), "set an address of this machine as listen under [proxy]"


def _quiet_logger() -> logging.Logger:
    """Return a logger without the requests that are no HTTP: any port scan could fill a log."""
    logger = logging.getLogger("proxy.http")
    logger.addFilter(_is_our_fault)
    return logger


def _is_our_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError)
