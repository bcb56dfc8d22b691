"""New lines of a log for a listener that takes them from time to time; bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from contextlib import suppress
from typing import Any, Final

LINES_MAX: Final = 2000
_TOGETHER_MAX: Final = 500


class LogLines:
    def __init__(self, source: str) -> None:
        self._source = source
        self._lines: deque[str] = deque()
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
        if len(self._lines) >= LINES_MAX:
            self._lines.popleft()
            self._dropped += 1
        self._lines.append(line)

    def take(self) -> dict[str, Any] | None:
        """What is new: `lines`, and how many were `dropped` before them; None: nothing."""
        if not self._lines:
            return None
        found: dict[str, Any] = {"source": self._source, "lines": list(self._lines)}
        if self._dropped:
            found["dropped"] = self._dropped
        self._lines.clear()
        self._dropped = 0
        return found
