"""The trace of a request, for code that must not import OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from aiohttp import web
from multidict import CIMultiDict


class RequestTrace(Protocol):
    """The trace that a request belongs to."""

    def pass_on(self, headers: CIMultiDict[str]) -> None:
        """Name it in the header of a request to an instance or a node."""

    def end(self, name: str, fields: Mapping[str, object]) -> None:
        """Send the spans of a request whose last event is `name`."""


class Tracer(Protocol):
    """Begins traces; `close` sends what is left, within half a second."""

    def begin(self, request: web.BaseRequest) -> RequestTrace: ...

    def close(self) -> None: ...
