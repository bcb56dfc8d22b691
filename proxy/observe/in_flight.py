"""Requests in flight: counted, waited for, and aborted from outside.

The task of an aborted request gets the given error at its next await, and closes what it opened.
All changes happen in methods without `await`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from proxy.errors import ProxyError
from proxy.observe.record import AccessRecord


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request as operators see it; `record` fills up on the way, `began_at_s` is monotonic."""

    record: AccessRecord
    client: str
    path: str
    began_at_s: float = field(default_factory=time.monotonic)


class InFlightRequest:
    """A request that is in flight during a `with` block.

    If it is aborted, the block raises the given error. As with `asyncio.timeout`, that is distinct
    from a cancellation of the task, which means that the client left.

    Attributes:
        open_request: The operators' view; None if it is no client's request, or only a part of one.
    """

    __slots__ = (
        "_cancel_soon",
        "_cancelled_before",
        "_is_cancelled",
        "_requests",
        "_task",
        "cut_by",
        "open_request",
    )

    def __init__(self, in_flight: InFlight[Any], open_request: OpenRequest | None = None) -> None:
        self._requests = in_flight
        self.open_request = open_request
        self.cut_by: ProxyError | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelled_before = 0
        self._is_cancelled = False
        self._cancel_soon: asyncio.Handle | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "a block runs in a task"  # noqa: S101 (for mypy)
        self._cancelled_before = self._task.cancelling()
        self._requests.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._requests.discard(self)
        task, self._task = self._task, None
        if self._cancel_soon is not None:
            self._cancel_soon.cancel()
        if task is None or not self._is_cancelled:
            return
        is_ours = task.uncancel() <= self._cancelled_before
        if is_ours and kind is asyncio.CancelledError and self.cut_by is not None:
            raise self.cut_by from None

    def abort(self, error: ProxyError) -> None:
        """End the request with this error. Only the first call counts."""
        if self.cut_by is None:
            self.cut_by = error
            # Not at once: the caller may be this task itself, which is then not at an await.
            self._cancel_soon = asyncio.get_running_loop().call_soon(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._is_cancelled = True
            self._task.cancel()


R = TypeVar("R", bound=InFlightRequest)


class InFlight(Generic[R]):
    """The requests in flight of one holder."""

    def __init__(self) -> None:
        self._requests: set[R] = set()
        self._landed = asyncio.Event()
        self._landed.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def add(self, request: R) -> None:
        self._requests.add(request)
        self._landed.clear()

    def discard(self, request: R) -> None:
        self._requests.discard(request)
        if not self._requests:
            self._landed.set()

    def abort(self, error: ProxyError) -> None:
        for request in self._requests:
            request.abort(error)

    async def wait_empty(self) -> None:
        await self._landed.wait()


class ServerState:
    """The forwarded requests in flight, and whether new ones are refused.

    Attributes:
        process: Id of this process for other proxies.
        watching: Endless streams, which do not delay a drain.
    """

    def __init__(self, process: str = "") -> None:
        self.process = process
        self.in_flight: InFlight[InFlightRequest] = InFlight()
        self.watching: InFlight[InFlightRequest] = InFlight()
        self.is_draining = False
