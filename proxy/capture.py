"""Where requests and their responses can be observed while a capture runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from proxy.access_log import AccessRecord
from proxy.request import ProxyRequest


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
