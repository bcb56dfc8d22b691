"""Clients' connections: how many there may be, and which one makes room for a new one. Pure.

Each connection takes a descriptor, and each request in flight one more towards its instance. Where
they run out, nothing can be started, written or accepted any more. So there is a limit, and beyond
it a connection on which no request was let in yet makes room: 2 000 silent ones without a key keep
no client with a key away. Requests under way never make room.
"""

from __future__ import annotations

import resource
from typing import Final, Generic, TypeVar

from proxy.errors import Unavailable

# More are of no use: requests wait in lines that are shorter.
_DEFAULT_MAX: Final = 1024
_LEAST: Final = 8
# For logs, the control socket, and what each instance needs: its socket, pipes and log.
_RESERVE_LEAST: Final = 128
# A quarter of all places is kept for connections that have yet to send their first request.
_NEW_SHARE: Final = 4

T = TypeVar("T")


class Connections(Generic[T]):
    """The connections that are open, by what they did so far.

    Args:
        limit: How many there may be, at least 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._new: dict[T, None] = {}  # no request of theirs was let in yet; oldest first
        self._idle: dict[T, None] = {}  # between two requests; idle longest first
        self._busy: set[T] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._busy)

    def add(self, one: T) -> T | None:
        """Take a new connection in; return the one to be closed for it, if any.

        Raises:
            Unavailable: Every connection has a request under way.
        """
        outgoing = self._outgoing() if len(self) >= self.limit else None
        if outgoing is not None:
            self.remove(outgoing)
        self._new[one] = None
        return outgoing

    def is_busy(self, one: T) -> bool:
        """Return whether a request is under way on a connection."""
        return one in self._busy

    def begin(self, one: T) -> None:
        """Note that a request was let in on a connection. One that was removed is fine."""
        if one in self._new or one in self._idle:
            self.remove(one)
            self._busy.add(one)

    def end(self, one: T) -> None:
        """Note that its request is over. One that has none is fine."""
        if one in self._busy:
            self._busy.remove(one)
            self._idle[one] = None

    def remove(self, one: T) -> None:
        """Forget a connection that is closed. One that was removed is fine."""
        self._new.pop(one, None)
        self._idle.pop(one, None)
        self._busy.discard(one)

    def _outgoing(self) -> T:
        first, second = self._new, self._idle
        if len(self._new) <= self.limit // _NEW_SHARE:
            first, second = second, first
        for one in (*list(first)[:1], *list(second)[:1]):
            return one
        raise Unavailable(
            f"all {self.limit} connections have a request under way; ask again, or raise "
            "max_connections under [proxy] and the limit of open files"
        )


def limit_of(wanted: int | None, descriptors: int) -> int:
    """Return how many connections there may be.

    Args:
        wanted: What is set, or None.
        descriptors: How many files and sockets the process may have open.
    """
    reserve = max(_RESERVE_LEAST, descriptors // 4)
    # Each request in flight needs a second one.
    room = max(_LEAST, (descriptors - reserve) // 2)
    return min(wanted or _DEFAULT_MAX, room)


def descriptors_max() -> int:
    """Return how many files and sockets this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else soft
