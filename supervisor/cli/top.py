"""Implements `corral top`: a live display of models and requests in the terminal."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
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
    """The terminal of stdin and stdout, which shows frames within the block."""

    def __init__(self) -> None:
        self.input = sys.stdin.fileno()
        self._settings = termios.tcgetattr(self.input)

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
        tty.setcbreak(self.input)
        write(_ENTER, end="", raw=True)

    def leave(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            # TCSAFLUSH: keys typed ahead do not reach the shell.
            termios.tcsetattr(self.input, termios.TCSAFLUSH, self._settings)
            write(_LEAVE, end="", raw=True)

    def size(self) -> tuple[int, int]:
        """Return columns and rows; 80 and 24 if the terminal does not report them."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or 80, found.lines or 24

    def show(self, lines: Sequence[str]) -> None:
        # Each line is cleared before it is written: clearing after a full line would delete its
        # last character.
        text = "\r\n".join(f"{_CLEAR_LINE}{line}" for line in lines)
        write(f"{_HOME}{text}", end="", raw=True)


_CANCELLATIONS_MAX: Final = 16
_BY_SIGNAL: Final = 128


class _Display:
    """Draws a frame after each sample, key and change of the terminal; `run` returns at the end."""

    def __init__(self, client: Client, interval_s: float, *, has_colour: bool) -> None:
        self._client = client
        self._interval_s = interval_s
        self._has_colour = has_colour
        self._terminal = Terminal()
        self._unfinished = b""
        self._sample = top_view.Sample()
        self._view = top_view.View()
        self._cancellations: queue.Queue[str] = queue.Queue(_CANCELLATIONS_MAX)
        # The daemon is not asked while the terminal accepts no output.
        self._may_ask = threading.Semaphore()

    async def run(self, first: top_view.Sample) -> int:
        """Show the display until q or a signal; return the exit code."""
        self._loop = loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._end, _BY_SIGNAL + number)
        with self._terminal:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend)
            loop.add_signal_handler(signal.SIGWINCH, self._draw)
            loop.add_reader(self._terminal.input, self._read_keys)
            self._take(first)
            # A daemon thread: the exit does not wait for a daemon that does not answer.
            threading.Thread(target=self._poll, daemon=True).start()
            return await self._ended

    def _poll(self) -> None:
        """In a thread: sample at an interval, and at once after a cancellation."""
        with suppress(RuntimeError):  # the loop has ended
            while self._may_ask.acquire():
                note = ""
                with suppress(queue.Empty):  # after the interval
                    note = top_view.cancel(
                        self._client, self._cancellations.get(timeout=self._interval_s)
                    )
                self._loop.call_soon_threadsafe(self._take, top_view.try_read(self._client, note))

    def _take(self, sample: top_view.Sample) -> None:
        self._view = top_view.with_sample(self._view, sample)
        self._sample = replace(sample, note="")
        # Nothing has followed: a lone escape.
        pressed, self._unfinished = flush(self._unfinished), b""
        self._press(pressed)
        self._may_ask.release()

    def _read_keys(self) -> None:
        data = b""
        with suppress(OSError):
            data = os.read(self._terminal.input, _READ_MAX_BYTES)
        if not data:  # the keyboard is gone
            self._end(_BY_SIGNAL + signal.SIGHUP)
            return
        pressed, self._unfinished = decode(self._unfinished + data)
        self._press(pressed)

    def _press(self, keys: Iterable[str]) -> None:
        for key in keys:
            view, cancelled = top_view.handle_key(self._view, key)
            self._view = top_view.with_sample(view, self._sample)
            if view.is_end:
                self._end(0)
            if cancelled:
                try:
                    self._cancellations.put_nowait(cancelled)
                except queue.Full:
                    note = "the daemon does not answer; try again later"
                    self._view = replace(self._view, note=note)
        self._draw()

    def _draw(self) -> None:
        # The loop still runs what is ready, such as a sample, after the terminal was left.
        if self._ended.done():
            return
        area = self._terminal.size()
        lines = top_view.screen(self._view, self._sample, area, has_colour=self._has_colour)
        self._terminal.show(lines)

    def _suspend(self) -> None:
        self._terminal.leave()
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell continues us
        self._terminal.enter()
        self._draw()

    def _end(self, exit_code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(exit_code)


def top(interval_s: float, *, once: bool, as_json: bool) -> CommandResult:
    """Show models and requests until q or Ctrl-C; with `once` or without a terminal, one frame."""
    client = Client(directories().control_socket)
    first = top_view.Sample(client.status(), client.requests())
    has_colour = wants_colour(sys.stdout)
    if once or as_json or not is_usable():
        columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
        text = top_view.render_once(first, columns, has_colour=has_colour)
        # The text has no control characters except those of its colours.
        data = {"status": first.status, "requests": first.requests}
        return CommandResult(data, text, is_raw=True)
    display = _Display(client, interval_s, has_colour=has_colour)
    return CommandResult(None, exit_code=asyncio.run(display.run(first)))
