"""Writes lines to a pipe whose reader may be slow, stopped or gone."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

_WAITING_MAX: Final = 1024
_FLUSH_TIMEOUT_S: Final = 1.0


class LineWriter:
    """Lines wait for a thread that writes them; `write` never waits.

    Of more than 1024 waiting lines the oldest are dropped; the line that `missed` makes of their
    number comes in their place.
    """

    def __init__(self, descriptor: int, missed: Callable[[int], str]) -> None:
        self._descriptor = descriptor
        self._missed = missed
        self._lines: deque[str] = deque()
        self._dropped = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        with self._changed:
            if len(self._lines) >= _WAITING_MAX:
                self._lines.popleft()
                self._dropped += 1
            self._lines.append(line)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, for a second at most."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        is_open = True
        while (text := self._next()) is not None:
            if is_open:
                is_open = self._write_all(text.encode(errors="backslashreplace"))

    def _next(self) -> str | None:
        with self._changed:
            while not (self._lines or self._is_closing):
                self._changed.wait()
            dropped, self._dropped = self._dropped, 0
            lines = [self._missed(dropped)] if dropped else []
            lines += [self._lines.popleft()] if self._lines else []
        return "".join(f"{line}\n" for line in lines) if lines else None

    def _write_all(self, content: bytes) -> bool:
        """Return whether the pipe has a reader."""
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
        except OSError:
            return False
        return True
