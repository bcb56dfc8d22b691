"""What is captured now: observes requests, and hands out the lines of the capture.

Requests never wait for it. What the reader is too slow for is dropped once 16 MiB wait, and
counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Final, Literal

from proxy.capture import Exchange
from proxy.request import ProxyRequest
from supervisor.capture.budget import Budget
from supervisor.capture.exchange import RecordedExchange
from supervisor.capture.limits import CaptureLimits
from supervisor.capture.lines import Line, RequestLine, ResponseLine, line

EndReason = Literal["time", "requests", "size", "stopped", "daemon_stopped"]

_WAITING_MAX_BYTES: Final = 16 * 1024**2
# A request takes this much beside its body.
_REQUEST_BYTES: Final = 4096
# The end of a capture needs room, whatever came before it.
_END_BYTES: Final = 512
# A reader that gets nothing for longer takes the daemon for dead.
_KEEP_ALIVE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class CaptureCounts:
    """`dropped`: requests and responses that are not in the capture."""

    requests: int
    responses: int
    dropped: int


class Recording:
    """Implements `proxy.capture.Observer` for one model; `now_s` is a monotonic clock."""

    def __init__(
        self,
        model: str,
        limits: CaptureLimits,
        now_s: Callable[[], float],
        *,
        waiting_max_bytes: int = _WAITING_MAX_BYTES,
    ) -> None:
        self.model = model
        self._limits = limits
        self._now_s = now_s
        self._began_at_s = now_s()
        self._budget = Budget(waiting_max_bytes)
        self._waiting: deque[tuple[Line, int]] = deque()
        self._changed = asyncio.Event()
        self._seen = self._open = 0
        self._requests = self._responses = self._dropped = 0
        self._is_closed = False  # to further requests
        self._closing_reason: EndReason = "stopped"
        self.reason: EndReason | None = None
        self.size_bytes = 0

    @property
    def counts(self) -> CaptureCounts:
        return CaptureCounts(self._requests, self._responses, self._dropped)

    @property
    def left_s(self) -> float:
        return max(0.0, self._began_at_s + self._limits.duration_s - self._now_s())

    def observe(self, request: ProxyRequest) -> Exchange | None:
        if self._is_closed or request.model != self.model or request.method != "POST":
            return None
        self._seen += 1
        held_bytes = len(request.body) + _REQUEST_BYTES
        if not self._budget.take(held_bytes):
            self._dropped += 1
            return None
        self._put(RequestLine(self._seen, self._now_ms(), request), held_bytes)
        self._requests += 1
        self._open += 1
        if self._requests == self._limits.requests:
            self.close("requests")
        return RecordedExchange(self._seen, self._budget, self._now_ms, self._end_exchange)

    def close(self, reason: EndReason) -> None:
        """Take no further request, and end when the responses to all are complete."""
        self._is_closed, self._closing_reason = True, reason
        if not self._open:
            self.stop(reason)

    def stop(self, reason: EndReason) -> None:
        """End now; only the first reason counts."""
        self._is_closed = True
        self.reason = self.reason or reason
        self._changed.set()

    async def lines(self, header: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the capture to its end, and empty ones while nothing happens."""
        self.size_bytes = len(header)
        yield header
        while True:
            if not self.left_s:
                self.stop("time")
            if self._waiting:
                one, held_bytes = self._waiting.popleft()
                encoded = await asyncio.to_thread(one.encoded)
                self._budget.give(held_bytes)
                if self.size_bytes + len(encoded) > self._limits.size_bytes - _END_BYTES:
                    self._lose(one)
                    break
                self.size_bytes += len(encoded)
                yield encoded
            elif self.reason:
                break
            elif not await self._has_more():
                yield b"\n"
        yield self._end_line()

    async def _has_more(self) -> bool:
        """Wait for a line, or for the end; return False after some seconds without."""
        self._changed.clear()
        try:
            async with asyncio.timeout(min(_KEEP_ALIVE_S, self.left_s)):
                await self._changed.wait()
        except TimeoutError:
            return not self.left_s
        return True

    def _lose(self, last: Line) -> None:
        """The file is full: what waits does not get into it."""
        lost = [last, *(one for one, _ in self._waiting)]
        self._requests -= sum(isinstance(one, RequestLine) for one in lost)
        self._responses -= sum(isinstance(one, ResponseLine) for one in lost)
        self._dropped += len(lost)
        self._waiting.clear()
        self.stop("size")

    def _end_exchange(self, response: ResponseLine | None, held_bytes: int) -> None:
        self._open -= 1
        if self.reason:  # nobody reads it any more
            return
        if response is None:
            self._dropped += 1
        else:
            self._responses += 1
            self._put(response, held_bytes)
        if self._is_closed and not self._open:
            self.stop(self._closing_reason)

    def _put(self, one: Line, held_bytes: int) -> None:
        self._waiting.append((one, held_bytes))
        self._changed.set()

    def _end_line(self) -> bytes:
        counts = self.counts
        return line(
            "end",
            at_ms=self._now_ms(),
            reason=self.reason,
            requests=counts.requests,
            responses=counts.responses,
            unanswered=self._open,
            dropped=counts.dropped,
        )

    def _now_ms(self) -> float:
        return round((self._now_s() - self._began_at_s) * 1000, 1)
