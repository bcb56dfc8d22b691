"""Where requests and their responses can be observed while a capture runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from multidict import CIMultiDict

from proxy.forward.response import PassedResponse, ResponseWriter
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest


class Exchange(Protocol):
    """One request and its response. Its methods must not fail and must not block."""

    def begin(self, status: int, content_type: str, /) -> None:
        """The response has a header; once more where another instance takes over."""

    def add(self, chunk: bytes, /) -> None:
        """The client got bytes of the body."""

    def end(self, record: AccessRecord, failure: BaseException | None, /) -> None:
        """The response is complete, or ended in a failure."""


class Observer(Protocol):
    def observe(self, request: ProxyRequest, /) -> Exchange | None:
        """A request begins; None: it is not observed."""


class CapturePoint:
    """`observer` is None but while requests are captured: that check is all that others cost."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None


class CapturedResponse(PassedResponse[ResponseWriter]):
    """A `ResponseWriter`; what the client did not get is not captured."""

    def __init__(self, writer: ResponseWriter, exchange: Exchange) -> None:
        super().__init__(writer)
        self._exchange = exchange

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._exchange.begin(status, headers.get("Content-Type", ""))
        await super().begin(status, headers)

    async def write(self, chunk: bytes) -> None:
        await self._writer.write(chunk)
        self._exchange.add(chunk)

    def put(self, chunk: bytes) -> bool:
        is_put = self._writer.put(chunk)
        if is_put:
            self._exchange.add(chunk)
        return is_put

    async def finish(self, last: bytes = b"") -> None:
        await self._writer.finish(last)
        self._exchange.add(last)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self._exchange.begin(status, headers.get("Content-Type", ""))
        await super().refuse(status, headers, body)
        self._exchange.add(body)
