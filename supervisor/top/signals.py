"""Signals as bytes of a socket, so that `select` waits for them and none interrupts a write."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, Self

_WAKE: Final = b"\x00"
_CAUGHT: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGWINCH,
)


class Signals:
    """The signals that a display acts on, caught in its block."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.settimeout(0)
        self._handlers = {number: signal.getsignal(number) for number in _CAUGHT}

    def __enter__(self) -> Self:
        # Source: Python docs, signal.set_wakeup_fd: the number of each signal, one byte each.
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in _CAUGHT:
            signal.signal(number, _ignore)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._theirs.close()
        self._ours.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def wake(self) -> None:
        """End a wait, from another thread."""
        with suppress(OSError):  # full: it ends anyway; closed: nobody waits
            self._theirs.send(_WAKE)

    def take(self) -> set[int]:
        """Return the signals since the last call."""
        try:
            return {*self._ours.recv(4096)} - {0}
        except BlockingIOError:
            return set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Let `select` return: the wake-up descriptor has the number."""
