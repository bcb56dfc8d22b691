"""Lets a running capture observe requests and their responses."""

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
        """Note the header of the response; called again if another instance takes over."""

    def add(self, chunk: bytes, /) -> None:
        """Note bytes of the body that the client got."""

    def end(self, record: AccessRecord, failure: BaseException | None, /) -> None:
        """Note that the response is complete, or ended in a failure."""


class Observer(Protocol):
    def observe(self, request: ProxyRequest, /) -> Exchange | None:
        """Return the exchange that begins with a request, or None to ignore the request."""


class CapturePoint:
    """`observer` is None unless a capture runs; other requests cost only that check."""

    def __init__(self) -> None:
        self.observer: Observer | None = None

    @contextmanager
    def attach(self, observer: Observer) -> Iterator[None]:
        self.observer = observer
        try:
            yield
        finally:
            self.observer = None


class CapturedResponse(PassedResponse[ResponseWriter]):
    """A `ResponseWriter` that captures only the bytes that the client got."""

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
