"""Finds the compute commands in what an engine sends to a worker. Pure.

Source: ggml-rpc.cpp. A request is a byte that names the command, the size of its data in 8 bytes,
little-endian, and its data. Commands that compute have no response.
"""

from __future__ import annotations

from typing import Final

# GRAPH_COMPUTE brings a graph, GRAPH_RECOMPUTE repeats the last one.
_COMPUTE: Final = frozenset({10, 16})
_HEADER_BYTES: Final = 9


class RequestReader:
    """Follows requests through chunks of any size; keeps at most a header."""

    def __init__(self) -> None:
        self._header = b""
        self._data_left = 0

    def feed(self, chunk: bytes) -> int:
        """Return how many compute commands end in a chunk."""
        at, computes = 0, 0
        while at < len(chunk) or self._is_at_end:
            if self._is_at_end:
                computes += self._header[0] in _COMPUTE
                self._header = b""
            else:
                at += self._take(chunk, at)
        return computes

    @property
    def _is_at_end(self) -> bool:
        return len(self._header) == _HEADER_BYTES and not self._data_left

    def _take(self, chunk: bytes, at: int) -> int:
        """Take the rest of a header, or data; return how many bytes."""
        if self._data_left:
            taken = min(self._data_left, len(chunk) - at)
            self._data_left -= taken
            return taken
        part = chunk[at : at + _HEADER_BYTES - len(self._header)]
        self._header += part
        if len(self._header) == _HEADER_BYTES:
            self._data_left = int.from_bytes(self._header[1:], "little")
        return len(part)
