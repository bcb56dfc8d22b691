"""A whole response, held until it is complete (`RequestWriter`)."""

from __future__ import annotations

from collections.abc import Callable

from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.endpoints import EndpointKind
from proxy.errors import UpstreamFailed
from proxy.forward.gather import GATHERED_MAX_BYTES
from proxy.router.lease import Lease


class HeldResponse:
    """The response to one request.

    Nothing of it is sent before its end, so another instance can always take over.

    Attributes:
        status: 0 before an instance has answered.
    """

    has_begun = False
    is_committed = False

    def __init__(self, record: AccessRecord, on_lease: Callable[[Lease], None]) -> None:
        self.record = record
        self.status = 0
        self._on_lease = on_lease
        self._body = bytearray()

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    def leased(self, lease: Lease) -> None:
        self.record.set_instance(
            lease.upstream.name, lease.expected_cached, lease.conversation_number
        )
        self.record.is_diverted = lease.is_diverted
        self._on_lease(lease)

    async def begin(self, status: int, _headers: CIMultiDict[str]) -> None:
        self.status = self.record.status = status
        self._body.clear()

    def put(self, _chunk: bytes) -> bool:
        """Leave it to `write`."""
        return False

    async def write(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > GATHERED_MAX_BYTES:
            raise UpstreamFailed(f"the response is larger than {GATHERED_MAX_BYTES} bytes")

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)
        self.record.count(self.body)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Take an instance's own error."""
        await self.begin(status, headers)
        await self.finish(body)

    def keep_alive(self, _kind: EndpointKind) -> None:
        """No client waits on a connection of its own."""

    async def end_wait(self) -> None:
        """Nothing was kept alive."""
