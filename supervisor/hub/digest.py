"""The digests by which the hub names contents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import IO, Final, Protocol

_CHUNK_BYTES: Final = 1024**2
_SHA1_LENGTH: Final = 40


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_like(expected: str, size_bytes: int) -> Digest:
    """Return an empty digest of the kind of `expected`, for a file of this size.

    A SHA-256 names a file in LFS, a git blob's SHA-1 any other. Source: gitformat-blob; the hub's
    field `blobId`.
    """
    if len(expected) != _SHA1_LENGTH:
        return hashlib.sha256()
    found = hashlib.sha1(usedforsecurity=False)
    found.update(b"blob %d\0" % size_bytes)
    return found


def update_from(
    digest: Digest, file: IO[bytes], size_bytes: int, progress: Callable[[int], None]
) -> None:
    """Add the next bytes of a file to a digest."""
    done_bytes = 0
    while chunk := file.read(min(_CHUNK_BYTES, size_bytes - done_bytes)):
        digest.update(chunk)
        done_bytes += len(chunk)
        progress(done_bytes)
