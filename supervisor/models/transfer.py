"""Downloads a file with resumption and a check of its hash; reads headers of remote GGUF files.

Downloads use plain HTTP with ranges, which the hub offers for files in its Xet store as well. So
they work through every proxy and mirror, and any later command can resume them. Xet's own protocol
saves the common parts of two versions of a file, but quantised models have none.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import io
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, NoReturn, Protocol, Self, cast

import filelock

from supervisor.errors import AccessDenied, DiskFull, DownloadFailed
from supervisor.models import gguf, metadata
from supervisor.models.gguf import Header
from supervisor.models.hub import Attempts, HubClient, Interruption
from supervisor.models.metadata import Gguf
from supervisor.output import size

_CHUNK_BYTES: Final = 1024**2
_SHA1_LENGTH: Final = 40


class Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def digest_like(expected: str, size_bytes: int) -> Digest:
    """Return a new digest of the same kind as `expected`, for a file of this size.

    A file in LFS has a SHA-256, any other the SHA-1 of a git blob. Source: gitformat-blob; the
    hub's field `blobId`.
    """
    if len(expected) != _SHA1_LENGTH:
        return hashlib.sha256()
    found = hashlib.sha1(usedforsecurity=False)
    found.update(b"blob %d\0" % size_bytes)
    return found


def update_from(
    digest: Digest, file: IO[bytes], size_bytes: int, progress: Callable[[int], None]
) -> None:
    done_bytes = 0
    while chunk := file.read(min(_CHUNK_BYTES, size_bytes - done_bytes)):
        digest.update(chunk)
        done_bytes += len(chunk)
        progress(done_bytes)


def check_space(directory: Path, wanted_bytes: int) -> None:
    """Raise DiskFull if a directory, which need not exist yet, has less space."""
    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    free_bytes = shutil.disk_usage(there).free
    if wanted_bytes > free_bytes:
        raise DiskFull(
            f"{size(wanted_bytes)} are to come, but {there} has {size(free_bytes)} free",
            hint="free some space, choose a smaller quantisation, or set another directory: "
            "HF_HOME for models of the hub, CORRAL_DATA_DIR for others",
        )


_POLL_S: Final = 1.0
# A live command gives up earlier: after four waits of up to a minute without a byte.
_STALLED_S: Final = 600.0


@contextmanager
def take_turn(lock: Path, part: Path, name: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file; wait while another command downloads the file.

    huggingface_hub uses the same lock, so its commands wait too.

    Raises:
        DownloadFailed: Another command holds the lock and makes no progress.
        OSError: The lock cannot be created.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(lock)
    _acquire(held, part, name, notify)
    try:
        yield
    finally:
        held.release()


def _acquire(
    held: filelock.BaseFileLock, part: Path, name: str, notify: Callable[[str], None]
) -> None:
    timeout_s, size_bytes, grew_at_s = 0.0, -1, time.monotonic()
    while True:
        try:
            held.acquire(timeout=timeout_s)
        except filelock.Timeout:
            if not timeout_s:
                notify(f"another command fetches {name}; waiting for it")
            timeout_s = _POLL_S
        else:
            return
        if (now_bytes := _size(part)) != size_bytes:
            size_bytes, grew_at_s = now_bytes, time.monotonic()
        elif time.monotonic() - grew_at_s > _STALLED_S:
            raise DownloadFailed(
                f"another command has held {name} for {_STALLED_S:.0f} s and fetched nothing",
                hint="end it, then run the same command again",
            )


def _size(part: Path) -> int:
    """Sum all partial files of a file, as each process of huggingface_hub has its own."""
    size_bytes = 0
    for path in part.parent.glob(f"{glob.escape(part.stem)}*{part.suffix}"):
        with suppress(FileNotFoundError):
            size_bytes += path.stat().st_size
    return size_bytes


_BUFFER_BYTES: Final = 1024**2


class PartFile:
    """Appends to a partial file, and computes the digest of its content.

    Args:
        path: The partial file, in an existing directory.
        digest: The digest of the whole file; if empty, the SHA-256 is computed.
        size_bytes: The size of the whole file.
        progress: Receives the bytes read so far from an earlier partial file.
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
        """Append bytes; raises OSError if the disk is full, but keeps the file."""
        self._file.write(data)
        self._digest.update(data)
        self.done_bytes += len(data)

    def flush(self) -> None:
        """Pass appended bytes to the system, so that they survive this process."""
        self._file.flush()

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = digest_like(self._expected, self._size_bytes)
        self.done_bytes = 0

    def publish(self, path: Path) -> None:
        """Write everything to the disk, then rename the file."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.replace(path)

    def discard(self) -> None:
        self._path.unlink(missing_ok=True)


# A CDN does not send objects of more than 50 GB at once, but it sends ranges of them. Source:
# huggingface_hub, constants.py, MAX_HTTP_DOWNLOAD_SIZE; CloudFront's quotas.
_RANGE_MAX_BYTES: Final = 16 * 1024**3
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RANGE: Final = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_AGAIN: Final = "; it continues where it stopped"

# Receives a stage (`check`, `download`), bytes done, and bytes in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A file to fetch.

    Attributes:
        name: For messages.
        digest: The hub's digest; empty if unknown.
        tag: The entity tag of a file without digest; needed to resume.
        part: The path of the partial file.
        target: The final path.
        lock: Held by the command that fetches the file.
    """

    name: str
    url: str
    size_bytes: int
    digest: str
    part: Path
    target: Path
    lock: Path
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Fetched:
    received_bytes: int  # by this command
    sha256: str  # or the SHA-1 of a git blob; empty if the file was there


def fetch(transfer: Transfer, client: HubClient, progress: Progress) -> Fetched:
    """Fetch a file unless it is there; two commands for the same file take turns.

    Raises:
        DownloadFailed: The download broke too often, or the file's digest or size is wrong.
        DiskFull: The disk is full; the partial file stays.
        AccessDenied: The directory cannot be used.
        CorralError: The server refuses.
    """
    with (
        _translate_disk_errors(transfer),
        take_turn(transfer.lock, transfer.part, transfer.name, client.notify),
    ):
        if _is_there(transfer):
            return Fetched(0, "")
        transfer.part.parent.mkdir(parents=True, exist_ok=True)

        def step(stage: str) -> Callable[[int], None]:
            return lambda done: progress(stage, done, transfer.size_bytes)

        with PartFile(transfer.part, transfer.digest, transfer.size_bytes, step("check")) as part:
            if not (transfer.digest or transfer.tag):
                part.restart()
            received = _receive(transfer, part, client, step("download"))
            if not part.is_as_expected:
                _reject(transfer, part, "its digest differs")
            part.publish(transfer.target)
            return Fetched(received, part.hex_digest)


def _is_there(transfer: Transfer) -> bool:
    try:
        return transfer.target.stat().st_size == transfer.size_bytes
    except OSError:
        return False


def _receive(
    transfer: Transfer, part: PartFile, client: HubClient, progress: Callable[[int], None]
) -> int:
    """Complete the partial file; return the bytes received."""
    received = 0

    def attempt(attempts: Attempts) -> None:
        nonlocal received
        try:
            for data in _pieces(transfer, part, client):
                part.append(data)
                attempts.note_progress()
                received += len(data)
                progress(part.done_bytes)
        finally:
            part.flush()

    while not part.is_complete:
        client.retry(attempt, f"the download of {transfer.name} broke", _AGAIN)
    return received


def _pieces(transfer: Transfer, part: PartFile, client: HubClient) -> Iterator[bytes]:
    """Request the next range; restarts the partial file if the server sends the whole file."""
    last = min(part.done_bytes + _RANGE_MAX_BYTES, transfer.size_bytes) - 1
    headers = {"range": f"bytes={part.done_bytes}-{last}"}
    if transfer.tag and part.done_bytes:
        headers["if-range"] = transfer.tag
    with client.stream(transfer.url, headers, transfer.name) as response:
        if response.status_code == HTTPStatus.OK:
            part.restart()
        elif not _continues(response, transfer, part):
            _reject(transfer, part, "the server has a file of another size")
        for data in response.iter_raw():
            if part.done_bytes + len(data) > transfer.size_bytes:
                _reject(transfer, part, "the server sends more than the hub lists")
            yield data
    if part.done_bytes <= last:
        raise Interruption("the connection ended early")


def _continues(response: Any, transfer: Transfer, part: PartFile) -> bool:
    found = _RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or response.status_code != HTTPStatus.PARTIAL_CONTENT:
        return False
    whole = str(transfer.size_bytes)
    return int(found[1]) == part.done_bytes and found[2] in {whole, "*"}


def _reject(transfer: Transfer, part: PartFile, reason: str) -> NoReturn:
    part.discard()
    raise DownloadFailed(
        f"{transfer.name} is not the file that the hub lists: {reason}",
        hint="what came of it was removed; run the same command again, "
        "and if it fails again, ask who runs the hub or the proxy on the way",
    )


@contextmanager
def _translate_disk_errors(transfer: Transfer) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = transfer.part.parent
        if error.errno in _NO_SPACE:
            raise DiskFull(
                f"no space is left in {where} for {transfer.name} ({size(transfer.size_bytes)})",
                hint=f"free some space, then run the same command again{_AGAIN}",
            ) from error
        raise AccessDenied(
            f"cannot write {transfer.name} in {where}: {error.strerror or error}",
            hint="make it writable, or set HF_HOME to another directory",
        ) from error


# The reader of headers reads no further.
_MOST_BYTES: Final = 64 * 1024**2 + 1024
_HEADER_BUFFER_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class RemotePart:
    url: str
    name: str
    size_bytes: int


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


def read(parts: Sequence[RemotePart], client: HubClient) -> Gguf:
    """Read the metadata of a model, given its shards in order.

    Raises:
        ModelInvalid: A shard is not a valid GGUF.
        CorralError: As HubClient.stream and HubClient.retry.
    """
    headers = [_header(part, client) for part in parts]
    digest = hashlib.sha256("".join(part.url for part in parts).encode()).hexdigest()
    size_bytes = sum(part.size_bytes for part in parts)
    return metadata.from_headers(Path(parts[0].name), size_bytes, headers, digest[:32])


def _header(part: RemotePart, client: HubClient) -> Header:
    last = max(0, min(part.size_bytes, _MOST_BYTES) - 1)

    def attempt(_: Attempts) -> Header:
        with client.stream(part.url, {"range": f"bytes=0-{last}"}, part.name) as response:
            stream = io.BufferedReader(_Stream(response, part.size_bytes), _HEADER_BUFFER_BYTES)
            return gguf.read(cast("Any", stream), part.name)

    return client.retry(attempt, f"cannot read the header of {part.name}")
