"""Reads the header of a GGUF file that is not here: only its beginning is requested."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from supervisor.gguf import header, metadata
from supervisor.gguf.header import Header
from supervisor.gguf.metadata import Gguf
from supervisor.hub.client import HubClient
from supervisor.hub.retry import Attempts

# The reader takes no more of a header.
_MOST_BYTES: Final = 64 * 1024**2 + 1024
_BUFFER_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class RemotePart:
    """A file of a model."""

    url: str
    name: str
    size_bytes: int


class _Stream(io.RawIOBase):
    """The body of a response as a file that is read from its beginning to its end."""

    def __init__(self, response: Any, size_bytes: int) -> None:
        self._pieces: Iterator[bytes] = response.iter_raw()
        self._left = b""
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, _offset: int, whence: int = os.SEEK_SET, /) -> int:
        # The reader asks for the size, and goes back to the beginning before it reads.
        return self._size_bytes if whence == os.SEEK_END else self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = piece
        count = min(len(buffer), len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        self._at += count
        return count


def read(parts: Sequence[RemotePart], client: HubClient) -> Gguf:
    """Read the metadata of a model, given its shards in order.

    Raises:
        ModelInvalid: It is no valid GGUF.
        CorralError: As HubClient.stream and HubClient.retried.
    """
    headers = [_header(one, client) for one in parts]
    digest = hashlib.sha256("".join(one.url for one in parts).encode()).hexdigest()
    size_bytes = sum(one.size_bytes for one in parts)
    return metadata.of_headers(Path(parts[0].name), size_bytes, headers, digest[:32])


def _header(part: RemotePart, client: HubClient) -> Header:
    last = max(0, min(part.size_bytes, _MOST_BYTES) - 1)

    def attempt(_: Attempts) -> Header:
        with client.stream(part.url, {"range": f"bytes=0-{last}"}, part.name) as response:
            stream = io.BufferedReader(_Stream(response, part.size_bytes), _BUFFER_BYTES)
            return header.read(cast("Any", stream), part.name)

    return client.retried(attempt, f"cannot read the header of {part.name}")
