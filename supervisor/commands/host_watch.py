"""Notices that the host of a desktop backend has gone: its pipe is closed, or its process ended."""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from supervisor.errors import SettingsInvalid
from supervisor.host.process_end import process_end
from supervisor.host.process_identity import ProcessIdentity, identity_of

_READ_BYTES: Final = 4096
# A pidfd waits in the kernel; systems without one look every 20 ms anyway.
_WAIT_S: Final = 3600.0
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OnGone = Callable[[str], None]


def watch_host(stdin: int, watch_pid: int | None, on_gone: OnGone) -> None:
    """Call `on_gone` with a reason, each time that something tells so; in any thread.

    Raises:
        SettingsInvalid: There is nothing to watch, or no such process.
    """
    process = _identity(watch_pid) if watch_pid else None
    is_watched = _can_close(stdin)
    if not (is_watched or process):
        raise SettingsInvalid(
            "corral serve --desktop cannot see the end of its host: standard input is no pipe",
            hint="keep a pipe open as its standard input, or pass --watch-pid PID",
        )
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: on_gone(f"{signal.Signals(received).name}"))
    if is_watched:
        _begin(lambda: _wait_closed(stdin, on_gone))
    if process:
        _begin(lambda: _wait_ended(process, on_gone))


def _identity(pid: int) -> ProcessIdentity:
    try:
        return identity_of(pid)
    except ProcessLookupError as error:
        raise SettingsInvalid(
            f"--watch-pid {pid}: there is no such process", hint="pass the pid of the application"
        ) from error


def _can_close(descriptor: int) -> bool:
    """Whether the end of a descriptor means that its other side has gone."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def _begin(watch: Callable[[], None]) -> None:
    threading.Thread(target=watch, daemon=True).start()


def _wait_closed(descriptor: int, on_gone: OnGone) -> None:
    with suppress(OSError):
        while os.read(descriptor, _READ_BYTES):
            pass
    on_gone("standard input was closed")


def _wait_ended(process: ProcessIdentity, on_gone: OnGone) -> None:
    with process_end(process) as end:
        while not end.wait(_WAIT_S):
            pass
    on_gone(f"process {process.pid} has ended")
