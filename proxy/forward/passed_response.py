"""Passes what belongs to a response on to another writer; subclasses change or keep some of it."""

from __future__ import annotations

from typing import Generic, TypeVar

from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.forward.client_response import RequestWriter, ResponseWriter
from proxy.router.lease import Lease

_Writer = TypeVar("_Writer", bound=ResponseWriter)


class PassedResponse(Generic[_Writer]):
    """A `ResponseWriter` before another one; subclasses write the body."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer
        self.record = writer.record

    @property
    def has_begun(self) -> bool:
        return self._writer.has_begun

    @property
    def is_committed(self) -> bool:
        return self._writer.is_committed

    def leased(self, lease: Lease) -> None:
        self._writer.leased(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        await self._writer.begin(status, headers)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        await self._writer.refuse(status, headers, body)


class PassedRequest(PassedResponse[RequestWriter]):
    """A `RequestWriter` before another one."""

    def keep_alive(self, kind: EndpointKind) -> None:
        self._writer.keep_alive(kind)

    async def end_wait(self) -> None:
        await self._writer.end_wait()
