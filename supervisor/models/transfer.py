"""Downloads a file with resumption and a check of its hash; reads headers of remote GGUF files.

Downloads use plain HTTP with ranges, which the hub offers for files in its Xet store as well. So
they work through every proxy and mirror, and any later command can resume them. Xet's own protocol
saves the common parts of two versions of a file, but quantised models have none.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import filelock

from supervisor.errors import DownloadFailed
from supervisor.models import gguf, metadata
from supervisor.models.gguf import Header
from supervisor.models.metadata import Gguf
from supervisor.output import size
from supervisor.system import download
from supervisor.system.download import Attempts, Client, Progress, RemoteFile
from supervisor.system.files import translate_disk_errors

# A live command gives up earlier: after four waits of up to a minute without a byte.
_STALLED_S: Final = 600.0


@contextmanager
def take_turn(
    lock: Path,
    part: Path,
    name: str,
    notify: Callable[[str], None],
    *,
    poll_s: float = 1.0,
    stalled_s: float = _STALLED_S,
) -> Iterator[None]:
    """Hold the lock of a file; wait while another command downloads the file.

    huggingface_hub uses the same lock, so its commands wait too. Raises DownloadFailed if another
    command holds the lock for `stalled_s` without progress, and OSError if it cannot be created.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held, size_bytes, grew_at_s = filelock.FileLock(lock), -1, time.monotonic()
    is_held = False
    while not is_held:
        try:
            held.acquire(timeout=0 if size_bytes < 0 else poll_s)
            is_held = True
        except filelock.Timeout:
            if size_bytes < 0:
                notify(f"another command fetches {name}; waiting for it")
            if (now_bytes := _size(part)) != size_bytes:
                size_bytes, grew_at_s = now_bytes, time.monotonic()
            elif time.monotonic() - grew_at_s > stalled_s:
                raise DownloadFailed(
                    f"another command has held {name} for {stalled_s:.0f} s and fetched nothing",
                    hint="end it, then run the same command again",
                ) from None
    try:
        yield
    finally:
        held.release()


def _size(part: Path) -> int:
    """Sum all partial files of a file, as each process of huggingface_hub has its own."""
    size_bytes = 0
    for path in part.parent.glob(f"{glob.escape(part.stem)}*{part.suffix}"):
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size
    return size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(RemoteFile):
    """A file to fetch into a store of models."""

    part: Path  # the path of the partial file
    target: Path  # the final path
    lock: Path  # held by the command that fetches the file


def fetch(transfer: Transfer, client: Client, progress: Progress) -> tuple[int, str]:
    """Fetch a file unless it is there; two commands for the same file take turns.

    Returns the bytes received by this command, and the digest; empty if the file was there. Raises
    DownloadFailed if the download broke too often or the file's digest or size is wrong, DiskFull
    (the partial file stays), AccessDenied, or the CorralError of a server that refuses.
    """

    def wrong(reason: str) -> DownloadFailed:
        return DownloadFailed(
            f"{transfer.name} is not the file that the hub lists: {reason}",
            hint="the incomplete file was removed; run the same command again, "
            "and if it fails again, ask who runs the hub or the proxy on the way",
        )

    part, target = transfer.part, transfer.target
    shown = f"{transfer.name} ({size(transfer.size_bytes)})"
    with (
        translate_disk_errors(part.parent, "HF_HOME", shown),
        take_turn(transfer.lock, part, transfer.name, client.notify),
    ):
        if target.exists() and target.stat().st_size == transfer.size_bytes:
            return 0, ""
        part.parent.mkdir(parents=True, exist_ok=True)
        return download.fetch(transfer, part, target, client, progress, wrong)


# The reader of headers reads no further.
_MOST_BYTES: Final = 64 * 1024**2 + 1024


class _Stream(io.RawIOBase):
    """The body of a response as a file that can be read once, from start to end."""

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
        # The reader seeks to the end for the size, and back to the start before it reads.
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


def read(parts: Sequence[RemoteFile], client: Client) -> Gguf:
    """Read the metadata of a model's shards, in order; raises ModelInvalid, or as `Client`."""
    headers = [_header(part, client) for part in parts]
    digest = hashlib.sha256("".join(part.url for part in parts).encode()).hexdigest()
    size_bytes = sum(part.size_bytes for part in parts)
    return metadata.from_headers(Path(parts[0].name), size_bytes, headers, digest[:32])


def _header(part: RemoteFile, client: Client) -> Header:
    last = max(0, min(part.size_bytes, _MOST_BYTES) - 1)

    def attempt(_: Attempts) -> Header:
        with client.stream(part.url, {"range": f"bytes=0-{last}"}, part.name) as response:
            stream = io.BufferedReader(_Stream(response, part.size_bytes), 64 * 1024)
            return gguf.read(cast("Any", stream), part.name)

    return client.retry(attempt, f"cannot read the header of {part.name}")
