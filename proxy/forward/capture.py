"""Lets a running capture observe requests and their responses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from multidict import CIMultiDict

from proxy.forward.response import StreamTransform
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest


class Exchange(Protocol):
    """One request and its response. Its methods must not fail and must not block."""

    def begin(self, status: int, content_type: str, /) -> None:
        """Note the header of the response; called again if another instance takes over."""

    def add(self, chunk: bytes, /) -> None:
        """Note bytes of the body that are sent to the client."""

    def end(self, record: AccessRecord, failure: BaseException | None, /) -> None:
        """Note that the response is complete, or ended in a failure."""


# Returns the exchange that begins with a request, or None to ignore the request.
Observe = Callable[[ProxyRequest], Exchange | None]


class CapturePoint:
    """`observe` is None unless a capture runs; other requests cost only that check."""

    def __init__(self) -> None:
        self.observe: Observe | None = None

    @contextmanager
    def attach(self, observe: Observe) -> Iterator[None]:
        self.observe = observe
        try:
            yield
        finally:
            self.observe = None


class Captured(StreamTransform):
    """Shows an exchange what the instance sends, before other transforms change it."""

    holds_whole = False

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._exchange.begin(status, headers.get("Content-Type", ""))

    def feed(self, chunk: bytes) -> bytes:
        self._exchange.add(chunk)
        return chunk

    def whole(self, status: int, body: bytes) -> bytes:  # noqa: ARG002 (of any status)
        return self.feed(body)

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:
        self.begin(status, headers)
        return self.feed(body)
