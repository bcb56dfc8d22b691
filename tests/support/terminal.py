"""A pseudo-terminal with a command in its foreground, as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
from typing import Self

from support.corral_cli import PATIENCE_S, CorralCli, until


class Terminal:
    """Runs a command; `written` is all that it has written, as the terminal got it."""

    def __init__(self, corral: CorralCli, *words: str, columns: int = 100, rows: int = 20) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, rows)
        self.settings = self.settings_now()
        self.written = b""
        # The command does not ask for the place of the cursor. The terminal is the controlling one,
        # which gets SIGWINCH and SIGINT.
        env = {**corral.env, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        assert corral.fork_server
        self.process = corral.fork_server.start(
            words, env, corral.root, dict.fromkeys(range(3), self._theirs), new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def settings_now(self) -> list[object]:
        return termios.tcgetattr(self._theirs)

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def read(self) -> None:
        while select.select([self._ours], [], [], 0)[0]:
            self.written += os.read(self._ours, 65_536)

    def text(self) -> str:
        """All that was written, without control sequences."""
        self.read()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.written.decode(errors="replace"))

    def press_until(self, keys: str, *texts: str) -> None:
        """Press keys, and wait until these texts were written since then."""
        begin = len(self.text())
        self.press(keys)
        until(lambda: all(text in self.text()[begin:] for text in texts))

    def end(self) -> int:
        """Return the exit code, once the terminal is as it was before."""
        code = self.process.wait(PATIENCE_S)
        self.read()
        assert self.settings_now() == self.settings
        return code
