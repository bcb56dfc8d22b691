"""The daemon's captures: one at a time, and only while its reader is there."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from proxy.access_log import Emit
from proxy.capture import CapturePoint
from supervisor.capture.limits import CaptureLimits
from supervisor.errors import DaemonBusy
from supervisor.fleet.planner import LaunchPlanner

if TYPE_CHECKING:
    from supervisor.capture.recording import Recording


class Captures:
    """`running` is None without one."""

    def __init__(
        self, point: CapturePoint, planner: Callable[[], LaunchPlanner], emit: Emit
    ) -> None:
        self._point = point
        self._planner = planner
        self._emit = emit
        self.running: Recording | None = None

    @asynccontextmanager
    async def begin(
        self, model: str, limits: CaptureLimits
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Capture for the block, which reads the lines.

        Raises:
            DaemonBusy: A capture runs.
            CorralError: The model is unknown, or cannot be planned.
        """
        # Imported here: most daemons need no memory for it.
        from supervisor.capture.header import header  # noqa: PLC0415
        from supervisor.capture.recording import Recording  # noqa: PLC0415

        if self.running:
            raise DaemonBusy(
                f"a capture of {self.running.model} is running",
                hint="corral capture --stop ends it",
            )
        self.running = recording = Recording(model, limits, time.monotonic)
        try:
            read = functools.partial(header, self._planner(), model, limits)
            first = await asyncio.to_thread(read)
            self._emit("capture.started", model=model, **asdict(limits))
            try:
                with self._point.observed_by(recording):
                    async with aclosing(recording.lines(first)) as lines:
                        yield lines
            finally:
                recording.stop("stopped")
                self._emit(
                    "capture.ended",
                    model=model,
                    reason=recording.reason,
                    size_bytes=recording.size_bytes,
                    **asdict(recording.counts),
                )
        finally:
            self.running = None

    def stop(self) -> None:
        """End the capture that runs, if one does."""
        if self.running:
            self.running.stop("stopped")

    def close(self) -> None:
        """End it with the response to the last request: the daemon stops."""
        if self.running:
            self.running.close("daemon_stopped")
