"""Client connections: their limit, and which one is closed for a new one. Pure.

Each connection uses a file descriptor, and each request in flight one more towards its instance;
without descriptors the daemon cannot start, write or accept anything. Above the limit, a connection
without an accepted request is closed first, so that silent ones cannot lock out clients with a key;
one with a request in flight is never closed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Final, Generic, Protocol, TypeVar, runtime_checkable

from proxy.errors import Unavailable

_resource: Final = import_module("resource") if find_spec("resource") else None  # not on Windows
# Descriptors on a system without a limit of them.
_NO_LIMIT: Final = 2**20
# Queues are shorter than that.
_DEFAULT_MAX: Final = 1024
_LEAST: Final = 8
# For logs, the control socket, and each instance's socket, pipes and log.
_RESERVE_LEAST: Final = 128
# A quarter of the limit is for connections that have yet to send their first request.
_NEW_SHARE: Final = 4

T = TypeVar("T")


@runtime_checkable
class Closable(Protocol):
    """A connection as others see it."""

    def give_way(self) -> None:
        """Close it for a new one: its descriptor is free at once."""


class Connections(Generic[T]):
    """The open connections, by state."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_closing = False  # whether each response is the last of its connection
        self.requests = 0  # accepted since the start
        self._new: dict[T, None] = {}  # without an accepted request; oldest first
        self._idle: dict[T, None] = {}  # between two requests; idle longest first
        self._busy: set[T] = set()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._busy)

    def add(self, one: T) -> T | None:
        """Add a connection; returns the one to close for it, if any.

        Raises:
            Unavailable: Every connection has a request in flight.
        """
        outgoing = self._outgoing() if len(self) >= self.limit else None
        if outgoing is not None:
            self.remove(outgoing)
        self._new[one] = None
        return outgoing

    def begin_closing(self) -> None:
        self.is_closing = True

    def is_busy(self, one: T) -> bool:
        return one in self._busy

    def begin(self, one: T) -> None:
        """A request was accepted; ignored for a removed connection."""
        self.requests += 1
        if one in self._new or one in self._idle:
            self.remove(one)
            self._busy.add(one)

    def end(self, one: T) -> None:
        """Its request ended; ignored without one."""
        if one in self._busy:
            self._busy.remove(one)
            self._idle[one] = None

    def remove(self, one: T) -> None:
        """It is closed; idempotent."""
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
            f"all {self.limit} connections have a request in flight; retry later, or raise "
            "max_connections under [proxy] and the limit of open files"
        )


def limit_of(wanted: int | None, descriptors: int) -> int:
    """The most connections: the setting, bounded by the limit of open files."""
    reserve = max(_RESERVE_LEAST, descriptors // 4)
    # Each request in flight needs a second one.
    room = max(_LEAST, (descriptors - reserve) // 2)
    return min(wanted or _DEFAULT_MAX, room)


def descriptors_max() -> int:
    """The limit of open files of this process."""
    if _resource is None:
        return _NO_LIMIT
    soft, _ = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    return _NO_LIMIT if soft == _resource.RLIM_INFINITY else int(soft)
