"""The terminal: its alternate screen, keys without echo, and everything back at the end."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from supervisor.output import write
from supervisor.top import keys

# Source: xterm's control sequences (ctlseqs): DECSET 1049 alternate screen, 25 cursor; CUP; EL.
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_HOME: Final = "\x1b[H"
_CLEAR_LINE: Final = "\x1b[K"
_READ_MAX_BYTES: Final = 1024


def is_usable() -> bool:
    """Whether there is a terminal that can place its cursor, with a keyboard."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


class Terminal:
    """The terminal of stdin and stdout, taken over in its block."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def enter(self) -> None:
        tty.setcbreak(self._input)
        write(_ENTER, end="", raw=True)

    def leave(self) -> None:
        with suppress(OSError, termios.error):  # the terminal may be gone
            # TCSAFLUSH: keys that were typed ahead do not reach the shell.
            termios.tcsetattr(self._input, termios.TCSAFLUSH, self._settings)
            write(_LEAVE, end="", raw=True)

    def fileno(self) -> int:
        return self._input

    def size(self) -> tuple[int, int]:
        """Return columns and rows; a terminal that does not know them has 80 and 24."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or 80, found.lines or 24

    def show(self, lines: Sequence[str]) -> None:
        # Each line is cleared before it is written: clearing after one that fills the line would
        # take its last character.
        text = "\r\n".join(f"{_CLEAR_LINE}{line}" for line in lines)
        write(f"{_HOME}{text}", end="", raw=True)

    def keys(self) -> list[str] | None:
        """Return the keys that were pressed; None where the keyboard is gone."""
        data = os.read(self._input, _READ_MAX_BYTES)
        if not data:
            return None
        pressed, self._unfinished = keys.decode(self._unfinished + data)
        return pressed

    def late_keys(self) -> list[str]:
        """Return keys that nothing followed: a lone escape."""
        pressed, self._unfinished = keys.flush(self._unfinished), b""
        return pressed
