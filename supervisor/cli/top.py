"""Implements `corral top`: a live display of models and requests in the terminal."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import socket
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Final, Self

from supervisor.cli import top_view
from supervisor.daemon.control_client import Client
from supervisor.output import CommandResult, wants_colour, write
from supervisor.system.paths import directories

# Source: ECMA-48 5.4, control sequences; SS3 in xterm's application mode (ctlseqs, "PC-Style").
_KEY: Final = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1bO[ -~]|[\x00-\xff]")
_UNFINISHED: Final = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|O)?\Z")
_UNFINISHED_MAX_BYTES: Final = 32
_NAMES: Final = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
}


def decode(data: bytes) -> tuple[list[str], bytes]:
    """Return the named keys, and the bytes at the end that may begin another key.

    A lone escape is such a beginning; call `flush` when nothing follows it.
    """
    found = _UNFINISHED.search(data[-_UNFINISHED_MAX_BYTES:])
    rest = found[0] if found else b""
    return flush(data[: len(data) - len(rest)]), rest


def flush(data: bytes) -> list[str]:
    keys = _KEY.findall(data)
    names = (
        _NAMES.get(key) or (key.decode() if re.fullmatch(rb"[ -~]", key) else "") for key in keys
    )
    return [*filter(None, names)]


_WAKE: Final = b"\x00"
_CAUGHT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)


class Signals:
    """Catches the signals that a display handles, within its block."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.settimeout(0)
        self._handlers = {number: signal.getsignal(number) for number in _CAUGHT}

    def __enter__(self) -> Self:
        # Writes one byte per signal, its number. Source: Python docs, signal.set_wakeup_fd.
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        for number in _CAUGHT:
            signal.signal(number, _ignore)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        self._theirs.close()
        self._ours.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def wake(self) -> None:
        """End a `select` of the main thread, from another thread."""
        with suppress(OSError):  # full: the wait ends anyway; closed: no reader is left
            self._theirs.send(_WAKE)

    def take(self) -> set[int]:
        """Return the signals since the last call."""
        try:
            return {*self._ours.recv(4096)} - {0}
        except BlockingIOError:
            return set()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; the wake-up descriptor gets the number, so that `select` returns."""


# Source: xterm's control sequences (ctlseqs): DECSET 1049 alternate screen, 25 cursor; CUP; EL.
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_READ_MAX_BYTES: Final = 1024


def is_usable() -> bool:
    """Return whether there is a terminal with a keyboard and a movable cursor."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """Controls the terminal of stdin and stdout within its block."""

    def __init__(self) -> None:
        self._input = sys.stdin.fileno()
        self._settings = termios.tcgetattr(self._input)
        self._unfinished = b""

    def __enter__(self) -> Self:
        try:
            self.enter()
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def enter(self) -> None:
        tty.setcbreak(self._input)
        write(_ENTER, end="", raw=True)

    def leave(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            # TCSAFLUSH: keys typed ahead do not reach the shell.
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._settings)
            write(_LEAVE, end="", raw=True)

    def fileno(self) -> int:
        return self._input

    def size(self) -> tuple[int, int]:
        """Return columns and rows; 80 and 24 if the terminal does not report them."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or 80, found.lines or 24

    def show(self, lines: Sequence[str]) -> None:
        # Each line is cleared before it is written: clearing after a full line would delete its
        # last character.
        text = "\r\n".join(f"{_CLEAR_LINE}{line}" for line in lines)
        write(f"{_HOME}{text}", end="", raw=True)

    def keys(self) -> list[str] | None:
        """Return the pressed keys; None if the keyboard is gone."""
        data = os.read(self._input, _READ_MAX_BYTES)
        if not data:
            return None
        pressed, self._unfinished = decode(self._unfinished + data)
        return pressed

    def late_keys(self) -> list[str]:
        """Return the key that nothing followed: a lone escape."""
        pressed, self._unfinished = flush(self._unfinished), b""
        return pressed


_CANCELLATIONS_MAX: Final = 16
_SAMPLES_MAX: Final = 4


class Poller:
    """Samples at an interval and cancels requests, in a thread that calls `wake`."""

    def __init__(self, client: Client, interval_s: float, wake: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._wake = wake
        self._cancellations: queue.Queue[str] = queue.Queue(_CANCELLATIONS_MAX)
        # Bounded, so the daemon is not asked while the terminal accepts no output.
        self._samples: queue.Queue[top_view.Sample] = queue.Queue(_SAMPLES_MAX)

    def start(self) -> None:
        # A daemon thread: the exit does not wait for a daemon that does not answer.
        threading.Thread(target=self._run, daemon=True).start()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request soon; False if too many cancellations wait already."""
        try:
            self._cancellations.put_nowait(request_id)
        except queue.Full:
            return False
        return True

    def take(self) -> top_view.Sample | None:
        """Return the next sample, None if there is no new one."""
        try:
            return self._samples.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        while True:
            note = ""
            with suppress(queue.Empty):  # after the interval
                note = top_view.cancel(
                    self._client, self._cancellations.get(timeout=self._interval_s)
                )
            self._samples.put(top_view.try_read(self._client, note))
            self._wake()


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL: Final = 128


class _Display:
    def __init__(
        self, poller: Poller, terminal: Terminal, signals: Signals, *, has_colour: bool
    ) -> None:
        self._poller = poller
        self._terminal = terminal
        self._signals = signals
        self._has_colour = has_colour
        self._sample = top_view.Sample()
        self._view = top_view.View()
        self._exit_code: int | None = None

    def run(self, first: top_view.Sample) -> int:
        self._take(first)
        while self._exit_code is None:
            area = self._terminal.size()
            lines = top_view.screen(self._view, self._sample, area, has_colour=self._has_colour)
            self._terminal.show(lines)
            keyboard = self._terminal.fileno()
            ready, _, _ = select.select([keyboard, self._signals.fileno()], [], [])
            keys = self._terminal.keys() if keyboard in ready else self._terminal.late_keys()
            if keys is None:
                self._exit_code = _BY_SIGNAL + signal.SIGHUP
            self._press(keys or ())
            self._handle(self._signals.take())
            while sample := self._poller.take():
                self._take(sample)
        return self._exit_code

    def _take(self, sample: top_view.Sample) -> None:
        self._view = top_view.with_sample(self._view, sample)
        self._sample = replace(sample, note="")

    def _press(self, keys: Iterable[str]) -> None:
        for key in keys:
            view, cancelled = top_view.handle_key(self._view, key)
            self._view = top_view.with_sample(view, self._sample)
            if view.is_end:
                self._exit_code = 0
            if cancelled and not self._poller.cancel(cancelled):
                note = "the daemon does not answer; try again later"
                self._view = replace(self._view, note=note)

    def _handle(self, signals: set[int]) -> None:
        for number in _ENDING:
            if number in signals:
                self._exit_code = _BY_SIGNAL + number
        if signal.SIGTSTP in signals:
            self._terminal.leave()
            os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell continues us
            self._terminal.enter()


def top(interval_s: float, *, once: bool) -> CommandResult:
    """Show models and requests until q or Ctrl-C; with `once` or without a terminal, one frame."""
    client = Client(directories().control_socket)
    first, has_colour = top_view.read_sample(client), wants_colour(sys.stdout)
    if once or not is_usable():
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
        text = top_view.render_once(first, columns, has_colour=has_colour)
        # The text has no control characters except those of its colours.
        return CommandResult(
            {"status": first.status, "requests": first.requests}, text, is_raw=True
        )
    with Signals() as signals, Terminal() as terminal:
        poller = Poller(client, interval_s, signals.wake)
        display = _Display(poller, terminal, signals, has_colour=has_colour)
        poller.start()
        return CommandResult(None, exit_code=display.run(first))
