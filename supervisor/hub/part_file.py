"""A file that grows to its size; it gets its final name when its digest is right."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from supervisor.hub.digest import digest_like, update_from

_BUFFER_BYTES: Final = 1024**2


class PartFile:
    """Appends to a partial file, and keeps the digest of what it holds.

    Args:
        path: Of the partial file; its directory exists.
        digest: That of the whole file; empty if unknown, then its SHA-256 is computed.
        size_bytes: Of the whole file.
        progress: Receives the bytes that were read again, of an earlier part.
    """

    def __init__(
        self, path: Path, digest: str, size_bytes: int, progress: Callable[[int], None]
    ) -> None:
        self._path = path
        self._expected = digest
        self._size_bytes = size_bytes
        self._file = path.open("ab+", buffering=_BUFFER_BYTES)
        self.done_bytes = path.stat().st_size
        self._digest = digest_like(digest, size_bytes)
        if self.done_bytes > size_bytes:
            self.restart()
        self._file.seek(0)
        update_from(self._digest, self._file, self.done_bytes, progress)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def is_complete(self) -> bool:
        return self.done_bytes >= self._size_bytes

    @property
    def hex_digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def is_as_expected(self) -> bool:
        return not self._expected or self.hex_digest == self._expected

    def append(self, data: bytes) -> None:
        """Raises OSError if the disk is full; what was written stays."""
        self._file.write(data)
        self._digest.update(data)
        self.done_bytes += len(data)

    def flush(self) -> None:
        """Give what was appended to the system: it survives this process."""
        self._file.flush()

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = digest_like(self._expected, self._size_bytes)
        self.done_bytes = 0

    def publish(self, path: Path) -> None:
        """Write everything to the disk, then rename."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.replace(path)

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)
