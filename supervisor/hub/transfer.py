"""Transfers one file, continues where it stopped, and checks what came.

Always over plain HTTP with ranges, which the hub offers for files in its Xet store as well. So it
works through every proxy and mirror, and can be continued by any later command. Xet's own protocol
would save what two versions of a file have in common, which quantised models do not have.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NoReturn

from supervisor.errors import AccessDenied, DiskFull, DownloadFailed
from supervisor.hub.client import HubClient
from supervisor.hub.part_file import PartFile
from supervisor.hub.retry import Attempts, Interruption
from supervisor.hub.turn import turn
from supervisor.output import size

# A CDN does not send objects of more than 50 GB at once. Source: huggingface_hub, constants.py,
# MAX_HTTP_DOWNLOAD_SIZE; CloudFront's quotas. Parts of them it does.
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
        digest: As the hub names it; empty if unknown.
        tag: The entity tag of a file without digest, which is continued only if it has one.
        part: Where it grows.
        target: Its final name.
        lock: Held by the one command that fetches it.
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
    sha256: str  # or the digest of its kind; empty if the file was there


def fetch(transfer: Transfer, client: HubClient, progress: Progress) -> Fetched:
    """Fetch a file unless it is there; two commands for one file take turns.

    Raises:
        DownloadFailed: It broke too often, or it is not what the hub says it is.
        DiskFull: The disk is full; what there is stays.
        AccessDenied: Its directory cannot be used.
        CorralError: The server refuses.
    """
    with _disk_errors(transfer), turn(transfer.lock, transfer.part, transfer.name, client.notify):
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
    """Complete the part; return the bytes that came for it."""
    received = 0

    def attempt(attempts: Attempts) -> None:
        nonlocal received
        try:
            for data in _pieces(transfer, part, client):
                part.append(data)
                attempts.progressed()
                received += len(data)
                progress(part.done_bytes)
        finally:
            part.flush()

    while not part.is_complete:
        client.retried(attempt, f"the download of {transfer.name} broke", _AGAIN)
    return received


def _pieces(transfer: Transfer, part: PartFile, client: HubClient) -> Iterator[bytes]:
    """Yield what comes next; the part is begun again where the server sends the whole file."""
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
def _disk_errors(transfer: Transfer) -> Iterator[None]:
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
