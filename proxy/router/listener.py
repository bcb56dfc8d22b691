"""What the router reports."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

from proxy.errors import UpstreamConnectFailed
from proxy.router.slot_use import SlotUse
from proxy.upstream.timings import Timings
from proxy.upstream.upstream import Upstream


class RouterListener(Protocol):
    """Runs the instances. None of these may fail or block."""

    def idle(self) -> None:
        """A model holds no request any more."""

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None:
        """An instance did not begin to answer a request."""

    def overdue(self, upstream: Upstream, reason: str, /) -> None:
        """An engine still computes `cancel_timeout_s` after its request is over."""

    def keep_alive(self, model: str, seconds: float, /) -> None:
        """A request that begins wants its model, of this machine, to stay loaded so long after it.

        Infinite: for ever.
        """

    def restore_verified(self, name: str, tokens: int, timings: Timings, /) -> None:
        """The first response to a prompt in a slot that was filled with so many tokens of it."""

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int, /) -> None:
        """A request got slots of an instance."""

    def slots_freed(self, lease: Hashable, use: SlotUse, /) -> None:
        """Its slots are idle again; each request that got slots frees them once."""


class NoListener:
    def idle(self) -> None: ...

    def connect_failed(self, upstream: Upstream, error: UpstreamConnectFailed, /) -> None: ...

    def overdue(self, upstream: Upstream, reason: str, /) -> None: ...

    def keep_alive(self, model: str, seconds: float, /) -> None: ...

    def restore_verified(self, name: str, tokens: int, timings: Timings, /) -> None: ...

    def slots_taken(self, lease: Hashable, upstream: Upstream, slots: int, /) -> None: ...

    def slots_freed(self, lease: Hashable, use: SlotUse, /) -> None: ...


NO_LISTENER: Final = NoListener()
