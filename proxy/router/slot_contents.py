"""How many tokens the slots of an engine hold, as its last list of slots showed."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.router.lease import Lease
from proxy.router.response_progress import Clock
from proxy.upstream.slots import SlotState
from proxy.upstream.upstream import Upstream


class SlotContents:
    """Keeps one list: what it is needed for is done before the next is read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._upstream = ""
        self._read_at_s = 0.0
        self._slots: Sequence[SlotState] = ()

    def observe(self, upstream: Upstream, slots: Sequence[SlotState]) -> None:
        self._upstream, self._slots, self._read_at_s = upstream.name, slots, self._clock()

    def of(self, lease: Lease) -> list[int]:
        """Tokens in each idle slot, once a request is over."""
        is_later = lease.is_ending and self._read_at_s >= lease.ended_at_s
        if not is_later or self._upstream != lease.upstream.name:
            return []
        return [one.tokens for one in self._slots if not one.is_busy]
