"""The desktop applications that use a daemon; the last one to leave ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from supervisor.errors import DaemonStopping
from supervisor.events import Emit

# The host that started the daemon, from the start of its process until it has joined.
STARTER: Final = 0
# A user who quits an application expects its processes to end.
_DRAIN_MAX_S: Final = 5.0


class DesktopHosts:
    """Counts hosts; calls `on_empty` once, when none is left."""

    def __init__(self, emit: Emit, on_empty: Callable[[], None]) -> None:
        self._emit = emit
        self._on_empty = on_empty
        self._hosts = {STARTER}
        self._joined = STARTER
        self._is_lost = False

    @property
    def is_empty(self) -> bool:
        return not self._hosts

    @property
    def drain_max_s(self) -> float:
        """How long requests may take at the end: not at all where the last host was killed."""
        return 0.0 if self._is_lost else _DRAIN_MAX_S

    def has(self, host: int) -> bool:
        return host in self._hosts

    @contextmanager
    def joined(self) -> Iterator[int]:
        """Be a host for the block, or until `leave`; yields its number.

        Raises:
            DaemonStopping: The last host has left.
        """
        if self.is_empty:
            raise DaemonStopping("the daemon is stopping", hint="retry when it has ended")
        self._joined += 1
        host = self._joined
        self._hosts.add(host)
        self._emit("host.joined", host=host, hosts=len(self._hosts - {STARTER}))
        try:
            yield host
        finally:
            self.lose(host)

    def lose(self, host: int) -> None:
        """Be told that a host is not there any more; no effect if it has left."""
        self._is_lost |= self._hosts == {host}
        self.leave(host)

    def leave(self, host: int) -> None:
        """Has no effect for a host that has left."""
        if not self.has(host):
            return
        self._hosts.remove(host)
        if host != STARTER:
            self._emit("host.left", host=host, hosts=len(self._hosts - {STARTER}))
        if self.is_empty:
            self._on_empty()
