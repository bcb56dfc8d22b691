"""New lines of a log for a listener that takes them from time to time; bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from contextlib import suppress
from typing import Any, Final

LINES_MAX: Final = 2000
_SIZE_MAX: Final = 1024**2  # characters
_TOGETHER_MAX: Final = 500


class LogLines:
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: deque[str] = deque()
        self._size = 0  # characters
        self._dropped = 0

    async def read(self, lines: AsyncIterable[str]) -> None:
        """Take all lines, until the file cannot be read any more."""
        count = 0
        with suppress(OSError):
            async for line in lines:
                self.add(line)
                count += 1
                if count % _TOGETHER_MAX == 0:
                    await asyncio.sleep(0)  # a flood of lines lets others run

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._size += len(line)
        while len(self._lines) > LINES_MAX or self._size > _SIZE_MAX:
            self._size -= len(self._lines.popleft())
            self._dropped += 1

    def take(self) -> dict[str, Any] | None:
        """What is new: `lines`, and how many were `dropped` before them; None: nothing."""
        if not self._lines:
            return None
        found: dict[str, Any] = {"source": self._source, "lines": list(self._lines)}
        if self._dropped:
            found["dropped"] = self._dropped
        self._lines.clear()
        self._size = self._dropped = 0
        return found
