"""A response that is held until it is whole, and rewritten before it is sent."""

from __future__ import annotations

from typing import ClassVar, Final

from aiohttp import web
from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.errors import UpstreamFailed
from proxy.forward.client_response import ClientResponse

_DEFAULT_MAX_BYTES: Final = 64 * 1024**2


class RewrittenResponse(ClientResponse):
    """Its subclasses rewrite; nothing is sent before `finish`, so another instance can take over.

    Attributes:
        max_bytes: The largest body that is held.
    """

    max_bytes: ClassVar[int] = _DEFAULT_MAX_BYTES

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        super().__init__(request, record)
        self._path = request.path
        self._has_body = request.method != "HEAD"
        self._held = bytearray()
        self._begun: tuple[int, CIMultiDict[str]] | None = None

    def rewritten(self, status: int, body: bytes) -> bytes:
        """Return the body for the client."""
        raise NotImplementedError

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        self._held.clear()
        self._begun = status, headers

    def put(self, _chunk: bytes) -> bool:
        """Leave it to `write`."""
        return False

    async def write(self, chunk: bytes) -> None:
        """Hold a piece; raises UpstreamFailed for too large a body."""
        self._held += chunk
        if len(self._held) > self.max_bytes:
            raise UpstreamFailed(
                f"{self._path} of {self.record.instance} is larger than {self.max_bytes} bytes"
            )

    async def finish(self, last: bytes = b"") -> None:
        await self.write(last)
        assert self._begun is not None, "it begins before it ends"  # noqa: S101 (for mypy)
        status, headers = self._begun
        body = self.rewritten(status, bytes(self._held))
        headers.pop("Content-Length", None)  # that of HEAD, too: the body would be shorter
        if self._has_body:
            headers["Content-Length"] = str(len(body))
        await super().begin(status, headers)
        await super().finish(body)
