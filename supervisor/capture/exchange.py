"""One captured request with its response, until that is complete."""

from __future__ import annotations

from collections.abc import Callable

from proxy.access_log import AccessRecord
from proxy.errors import ProxyError
from supervisor.capture.budget import Budget
from supervisor.capture.lines import ResponseLine

# A chunk takes this much beside its bytes.
_CHUNK_BYTES = 200


class RecordedExchange:
    """Implements `proxy.capture.Exchange`.

    `ended` gets the line of the response and the bytes that it takes of the budget, or None where
    they were more than is left.
    """

    def __init__(
        self,
        number: int,
        budget: Budget,
        now_ms: Callable[[], float],
        ended: Callable[[ResponseLine | None, int], None],
    ) -> None:
        self._number = number
        self._budget = budget
        self._now_ms = now_ms
        self._ended = ended
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
        if self._budget.take(count):
            self._held_bytes += count
            self._chunks.append((self._now_ms(), chunk))
        else:
            self._drop()

    def end(self, record: AccessRecord, failure: BaseException | None) -> None:
        timings = record.timings
        line = ResponseLine(
            number=self._number,
            status=self._status,
            content_type=self._content_type,
            chunks=self._chunks,
            end_ms=self._now_ms(),
            instance=record.instance,
            slot=record.slot,
            timings=timings,
            first_token_ms=record.timeline.first_token_ms,
            times_ms=record.timeline.times_ms(timings.decode_ms if timings else None),
            failure=_reason(failure) if failure else None,
        )
        self._ended(None if self._is_dropped else line, self._held_bytes)

    def _drop(self) -> None:
        self._budget.give(self._held_bytes)
        self._chunks, self._held_bytes, self._is_dropped = [], 0, True


def _reason(failure: BaseException) -> str:
    if isinstance(failure, ProxyError):
        return f"{failure.code}: {failure.message}"
    return "cancelled: the client left, or an operator ended it"
