"""How many bytes may wait in memory for the reader of a capture."""

from __future__ import annotations


class Budget:
    def __init__(self, max_bytes: int) -> None:
        self._left_bytes = max_bytes

    def take(self, count: int) -> bool:
        """Reserve bytes; return False, with nothing done, where so many are not left."""
        if count > self._left_bytes:
            return False
        self._left_bytes -= count
        return True

    def give(self, count: int) -> None:
        self._left_bytes += count
