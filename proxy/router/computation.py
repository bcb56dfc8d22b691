"""One request while an instance computes it, and what becomes of it when the engine crashes.

When an engine dies, the first that is seen of it is a broken connection. Whoever runs the engine
tells how its process ended a moment later, so a request that broke waits for that. It is not tried
again after a crash: the next engine would most likely crash too.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final

from proxy.errors import (
    UpstreamCrashed,
    UpstreamFailed,
    UpstreamLoading,
    UpstreamShutDown,
    UpstreamSilent,
    UpstreamUnavailable,
    UpstreamUnconnected,
)
from proxy.router.suspects import Suspects

if TYPE_CHECKING:
    from proxy.router.lease import Lease

# Between the end of a connection and the end of its process lie milliseconds, and up to half a
# second in which the last of its output is read. Two tries that wait for engines which live after
# all must end before a stream's first comment, or their error could no longer be a status.
_PATIENCE_S: Final = 0.75
# With these the process lives, is ended by us, or has not seen the request.
_NO_CRASH: Final = (
    UpstreamLoading,
    UpstreamSilent,
    UpstreamShutDown,
    UpstreamUnconnected,
    UpstreamUnavailable,
)


class Ending:
    """How the process ended that computed a request.

    Attributes:
        is_crash: Whether a signal ended it that nobody here sent; None as long as it is not told.
    """

    def __init__(self) -> None:
        self.is_crash: bool | None = None
        self._told = asyncio.Event()

    def tell(self, *, is_crash: bool) -> None:
        """Say how it ended; the first word counts."""
        if self.is_crash is None:
            self.is_crash = is_crash
            self._told.set()

    async def wait(self, queue_timeout_s: float) -> bool:
        """Return whether it was a crash; False where nobody says so in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(queue_timeout_s):
                await self._told.wait()
        return bool(self.is_crash)


class Computation:
    """`async with Computation(...)`: from the request's first byte to the last of its answer.

    It raises CrashesEngine at its begin for a request that is refused, and UpstreamCrashed in the
    place of the error that a crash brought.

    Args:
        lease: The request's.
        suspects: Requests that engines computed when they crashed.
    """

    def __init__(self, lease: Lease, suspects: Suspects) -> None:
        self._lease = lease
        self._suspects = suspects

    async def __aenter__(self) -> None:
        lease = self._lease
        try:
            self._suspects.check(lease.request)  # it may have waited while another like it crashed
        except BaseException:
            lease.complete()  # nothing was sent
            raise
        lease.instance.computed.append(lease)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, UpstreamFailed) and await self._is_crash(error):
                raise UpstreamCrashed(
                    f"{self._lease.upstream.name} crashed while computing this request, which is "
                    "not retried; see its log (`corral logs`)"
                ) from error
        finally:
            self._lease.instance.computed.remove(self._lease)
        if error is None:
            self._suspects.clear(self._lease.request)

    async def _is_crash(self, error: UpstreamFailed) -> bool:
        if isinstance(error, _NO_CRASH) or not self._lease.upstream.tells_its_end:
            return False
        return await self._lease.ending_of_process.wait(_PATIENCE_S)
