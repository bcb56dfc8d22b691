"""The daemon's capture: observes requests and streams their lines to its reader.

Requests never wait for it. Lines that the reader is too slow for are dropped once 16 MiB wait, and
counted.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from typing import Final, Literal

from attrs import define, field

from proxy.errors import ProxyError
from proxy.forward.inspection import CapturePoint, Exchange
from proxy.observe.record import AccessRecord, Emit
from proxy.request.request import ProxyRequest
from supervisor.errors import DaemonBusy
from supervisor.events import Event, Part
from supervisor.experiments import capture_lines
from supervisor.experiments.capture_lines import CaptureLimits
from supervisor.fleet.fleet import Fleet

# Estimated memory of a chunk in addition to its bytes.
_CHUNK_BYTES = 200
# Encodes a line, which takes time in proportion to the body.
_Encode = Callable[[], bytes]


class RecordedExchange:
    """Implements `proxy.forward.inspection.Exchange` for request `number` of a recording."""

    def __init__(self, number: int, recording: Recording) -> None:
        self._number = number
        self._recording = recording
        self._status: int | None = None
        self._content_type = ""
        self._chunks: list[tuple[float, bytes]] = []
        self._held_bytes = 0
        self._is_dropped = False

    def begin(self, status: int, content_type: str) -> None:
        self._status, self._content_type = status, content_type

    def add(self, chunk: bytes) -> None:
        if self._is_dropped or not chunk:
            return
        count = len(chunk) + _CHUNK_BYTES
        if self._recording.take(count):
            self._held_bytes += count
            self._chunks.append((self._recording.now_ms(), chunk))
        else:
            self._recording.take(-self._held_bytes)
            self._chunks, self._held_bytes, self._is_dropped = [], 0, True

    def end(self, record: AccessRecord, failure: BaseException | None) -> None:
        timings = record.timings
        members = {
            "n": self._number,
            "status": self._status,
            "content_type": self._content_type,
            "end_ms": self._recording.now_ms(),
            "instance": record.instance,
            "slot": record.slot,
            "first_token_ms": record.timeline.first_token_ms,
            "times_ms": record.timeline.times_ms(timings.decode_ms if timings else None),
            "timings": asdict(timings) if timings else None,
            "failure": _reason(failure) if failure else None,
        }
        encode = functools.partial(capture_lines.response_line, members, self._chunks)
        self._recording.end_exchange(None if self._is_dropped else encode, self._held_bytes)


def _reason(failure: BaseException) -> str:
    if isinstance(failure, ProxyError):
        return f"{failure.code}: {failure.message}"
    return "cancelled: the client left, or an operator ended it"


EndReason = Literal["time", "requests", "size", "stopped", "daemon_stopped"]

_WAITING_MAX_BYTES: Final = 16 * 1024**2
# Estimated memory of a request in addition to its body.
_REQUEST_BYTES: Final = 4096
# Room kept for the end line.
_END_BYTES: Final = 512
# A reader that gets nothing for longer believes the daemon dead.
_PING_S: Final = 5.0


@define(eq=False, slots=False)
class Recording:
    """Observes one model (`proxy.forward.inspection.Observe`); `now_s` is a monotonic clock.

    `counts` has the requests and responses in the capture, and those `dropped` from it.
    """

    model: str
    _limits: CaptureLimits
    _now_s: Callable[[], float]
    _left_bytes: int = field(default=_WAITING_MAX_BYTES, alias="waiting_max_bytes")
    # A name in `counts`, the line, and the bytes that it holds.
    _waiting: deque[tuple[str, _Encode, int]] = field(factory=deque, init=False)
    _changed: asyncio.Event = field(factory=asyncio.Event, init=False)
    _is_closed: bool = field(default=False, init=False)  # to new requests
    _closing_reason: EndReason = field(default="stopped", init=False)
    reason: EndReason | None = field(default=None, init=False)
    size_bytes: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._began_at_s = self._now_s()
        self._seen = self._open = 0
        self.counts = {"requests": 0, "responses": 0, "dropped": 0}

    @property
    def left_s(self) -> float:
        return max(0.0, self._began_at_s + self._limits.duration_s - self._now_s())

    def now_ms(self) -> float:
        return round((self._now_s() - self._began_at_s) * 1000, 1)

    def take(self, count: int) -> bool:
        """Reserve bytes, or return some; False and nothing reserved if fewer are left."""
        if count > self._left_bytes:
            return False
        self._left_bytes -= count
        return True

    def observe(self, request: ProxyRequest) -> Exchange | None:
        if self._is_closed or request.model != self.model or request.method != "POST":
            return None
        self._seen += 1
        held_bytes = len(request.body) + _REQUEST_BYTES
        if not self.take(held_bytes):
            self.counts["dropped"] += 1
            return None
        encode = functools.partial(capture_lines.request_line, self._seen, self.now_ms(), request)
        self._put("requests", encode, held_bytes)
        self._open += 1
        if self.counts["requests"] == self._limits.requests:
            self.close("requests")
        return RecordedExchange(self._seen, self)

    def end_exchange(self, encode: _Encode | None, held_bytes: int) -> None:
        """Take a response's line, or None if it was dropped, and the bytes that it holds."""
        self._open -= 1
        if self.reason:  # its reader has left
            return
        if encode is None:
            self.counts["dropped"] += 1
        else:
            self._put("responses", encode, held_bytes)
        if self._is_closed and not self._open:
            self.stop(self._closing_reason)

    def close(self, reason: EndReason) -> None:
        """Take no new request, and end when the responses to all are complete."""
        self._is_closed, self._closing_reason = True, reason
        if not self._open:
            self.stop(reason)

    def stop(self, reason: EndReason) -> None:
        """End now; only the first reason counts."""
        self._is_closed = True
        self.reason = self.reason or reason
        self._changed.set()

    async def lines(self, header: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the capture to its end, and empty lines while nothing happens."""
        self.size_bytes = len(header)
        yield header
        while True:
            if not self.left_s:
                self.stop("time")
            if self._waiting:
                encoded = await asyncio.to_thread(self._waiting[0][1])
                if self.size_bytes + len(encoded) > self._limits.size_bytes - _END_BYTES:
                    self._drop_waiting()
                    break
                self.take(-self._waiting.popleft()[2])
                self.size_bytes += len(encoded)
                yield encoded
            elif self.reason:
                break
            elif not await self._wait_for_line():
                yield b"\n"
        end = {"at_ms": self.now_ms(), "reason": self.reason, "unanswered": self._open}
        yield capture_lines.line("end", **end, **self.counts)

    async def _wait_for_line(self) -> bool:
        """Wait for a line or the end; return False after some seconds without either."""
        self._changed.clear()
        try:
            async with asyncio.timeout(min(_PING_S, self.left_s)):
                await self._changed.wait()
        except TimeoutError:
            return not self.left_s
        return True

    def _drop_waiting(self) -> None:
        """End because the file is full; the waiting lines are not in it."""
        for name, _, _ in self._waiting:
            self.counts[name] -= 1
            self.counts["dropped"] += 1
        self._waiting.clear()
        self.stop("size")

    def _put(self, name: str, encode: _Encode, held_bytes: int) -> None:
        self.counts[name] += 1
        self._waiting.append((name, encode, held_bytes))
        self._changed.set()


class Captures(Part):
    """`running` is None if no capture runs."""

    def __init__(self, point: CapturePoint, fleet: Fleet, emit: Emit) -> None:
        self._point = point
        self._fleet = fleet
        self._emit = emit
        self.running: Recording | None = None

    @asynccontextmanager
    async def begin(
        self, model: str, limits: CaptureLimits
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Capture for the block, which reads the lines; raises DaemonBusy while a capture runs."""
        if self.running:
            raise DaemonBusy(
                f"a capture of {self.running.model} is running",
                hint="corral capture --stop ends it",
            )
        self.running = recording = Recording(model, limits, time.monotonic)
        try:
            read = functools.partial(capture_lines.header, self._fleet.planner, model, limits)
            first = await asyncio.to_thread(read)
            self._emit("capture.started", model=model, **asdict(limits))
            try:
                with self._point.attach(recording.observe):
                    async with aclosing(recording.lines(first)) as lines:
                        yield lines
            finally:
                recording.stop("stopped")
                self._emit(
                    "capture.ended",
                    model=model,
                    reason=recording.reason,
                    size_bytes=recording.size_bytes,
                    **recording.counts,
                )
        finally:
            self.running = None

    def stop(self) -> None:
        if self.running:
            self.running.stop("stopped")

    def observe(self, event: Event) -> None:
        """End the running capture after the last response when the daemon stops."""
        if event.name == "daemon.stopping" and self.running:
            self.running.close("daemon_stopped")
