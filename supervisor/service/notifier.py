"""Tells the service manager what the daemon does, and that its event loop turns.

    READY=1        clients and commands are answered; models may still load
    STATUS         instances ready, and the progress of those that load
    WATCHDOG=1     from a task of the event loop: a loop that is blocked sends none
    RELOADING=1    new settings are being applied; READY=1 ends it
    STOPPING=1     running requests are finished, slots saved, engines stopped

While models load, settings are applied, or requests are drained, the manager's time limit is
extended: the daemon has its own, and a manager that knows others kills it in the middle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from supervisor.events import Event
from supervisor.service import notification
from supervisor.service.load_status import LoadStatus
from supervisor.service.notify_socket import Send

_EXTENSION_S: Final = 30.0
_INTERVAL_S: Final = 5.0


class ServiceNotifier:
    """Without `send`, there is no service manager, and nothing is sent."""

    def __init__(self, send: Send | None = None, watchdog_s: float | None = None) -> None:
        self._send_message = send
        self._pings = (notification.PING,) if watchdog_s else ()
        # Half of the limit. Source: sd_watchdog_enabled(3).
        self._interval_s = min(_INTERVAL_S, watchdog_s / 2 if watchdog_s else _INTERVAL_S)
        self._load = LoadStatus()
        self._text = ""
        self._is_started = self._is_stopping = False
        self._reloads = 0

    @property
    def _is_extending(self) -> bool:
        return self._is_stopping or self._reloads > 0 or self._load.is_loading

    def started(self) -> None:
        self._is_started = True
        self._send(notification.READY)
        self._send_status()

    def stopping(self) -> None:
        self._is_stopping = True
        self._send(notification.STOPPING, notification.extend_timeout(_EXTENSION_S))
        self._send_status()

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload for the time of the block."""
        self._reloads += 1
        if self._is_serving:
            now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
            extension = notification.extend_timeout(_EXTENSION_S)
            self._send(notification.reloading(now_ns), extension)
        try:
            yield
        finally:
            self._reloads -= 1
            if self._is_serving and not self._reloads:
                self._send(notification.READY)

    @property
    def _is_serving(self) -> bool:
        return self._is_started and not self._is_stopping

    def observe(self, event: Event) -> None:
        """A sink of the event stream."""
        if self._load.observe(event):
            self._send_status()

    async def serve(self) -> None:
        """Send what is due, at half the watchdog's limit at the latest, until cancelled."""
        if self._send_message is None:
            return
        while True:
            extension = notification.extend_timeout(_EXTENSION_S)
            self._send(*self._pings, *([extension] if self._is_extending else []))
            await asyncio.sleep(self._interval_s)

    def _send_status(self) -> None:
        text = f"stopping; {self._load.text}" if self._is_stopping else self._load.text
        if text != self._text:
            self._text = text
            self._send(notification.status(text))

    def _send(self, *lines: str) -> None:
        if self._send_message is not None and lines:
            self._send_message("\n".join(lines))
