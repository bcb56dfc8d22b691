"""What an instance's answer is written to: the client's own response, or a part of one."""

from __future__ import annotations

from typing import Protocol

from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.router.lease import Lease


class ResponseWriter(Protocol):
    """Takes one answer, piece by piece.

    Attributes:
        record: What is remembered of it.
    """

    record: AccessRecord

    @property
    def has_begun(self) -> bool:
        """Whether anything was sent; an error can then no longer become a status."""

    @property
    def is_committed(self) -> bool:
        """Whether anything of an instance's answer was sent; no other can then take over."""

    def leased(self, lease: Lease, /) -> None:
        """Note that an instance has the request now."""

    async def begin(self, status: int, headers: CIMultiDict[str], /) -> None:
        """Set the status and the header."""

    async def write(self, chunk: bytes, /) -> None:
        """Take bytes of the body; returns when there is room for more."""

    def put(self, chunk: bytes, /) -> bool:
        """Take bytes of the body at once; return False, with nothing done, if that cannot be."""

    async def finish(self, last: bytes = b"", /) -> None:
        """Take the last bytes of the body."""

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes, /) -> None:
        """Take an instance's own error."""
