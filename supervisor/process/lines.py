"""Cuts a stream of bytes into lines, however the bytes come and however long a line is. Pure."""

from __future__ import annotations

from typing import Final

LINE_MAX_BYTES: Final = 4096


class LineSplitter:
    """Cuts a stream of bytes into lines of bounded length.

    Args:
        limit_bytes: What a line has beyond this is dropped.
    """

    def __init__(self, limit_bytes: int = LINE_MAX_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._open = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the lines that `chunk` completes, without their ends."""
        first, *others = chunk.split(b"\n")
        self._open += first[: self._limit_bytes - len(self._open)]
        if not others:
            return []
        lines = [self._open, *(line[: self._limit_bytes] for line in others[:-1])]
        self._open = others[-1][: self._limit_bytes]
        return lines
