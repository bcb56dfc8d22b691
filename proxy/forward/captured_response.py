"""Passes a response on, and shows it to what captures it."""

from __future__ import annotations

from multidict import CIMultiDict

from proxy.capture import Exchange
from proxy.forward.client_response import ResponseWriter
from proxy.forward.passed_response import PassedResponse


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
