"""Downloads a file of known size and SHA-256, and continues what broke. Blocks.

The file gets its name when it is whole and right; until then it is `NAME.part`. One
that is there is taken if it is right.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from supervisor.errors import DownloadFailed

# Broken connections in a row, without a byte between them, before it is given up.
_ATTEMPTS: Final = 4
_PAUSE_S = 2.0
_CONNECTIONS_MAX: Final = 100
PART: Final = ".part"
_RETRY: Final = "run the same command again"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file elsewhere; the name is one that a file may have here."""

    name: str
    url: str | httpx.URL
    sha256: str
    size_bytes: int


def download(
    client: httpx.Client, file: RemoteFile, directory: Path, progress: Progress, source: str
) -> Path:
    """Put a file into a directory; a part of it that is there is continued.

    Args:
        client: Follows redirects.
        file: What to download.
        directory: Where it gets its name.
        progress: Receives bytes done and bytes in all.
        source: Who knows its size and its SHA-256, for messages.

    Raises:
        DownloadFailed: The download broke, or it is not the file that the source knows.
        OSError: The directory cannot be written.
    """
    whole = directory / file.name
    if whole.exists() and _digest(whole) == file.sha256:
        return whole
    part = directory / f"{file.name}{PART}"
    try:
        _transfer(client, file, part, progress)
    except httpx.TooManyRedirects as error:
        raise DownloadFailed(f"{file.name} is redirected without end") from error
    except httpx.HTTPStatusError as error:
        raise DownloadFailed(
            f"{file.name} cannot be downloaded: {error.response.url.host} answers "
            f"{error.response.status_code} {error.response.reason_phrase}",
            hint=_RETRY,
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DownloadFailed(
            f"the download of {file.name} broke: {error!r}",
            hint=f"{_RETRY}; it continues where it stopped",
        ) from error
    if _digest(part) != file.sha256:
        part.unlink()
        raise DownloadFailed(
            f"{file.name} is damaged: its SHA-256 is not that of {source}",
            hint=f"it was removed; {_RETRY}",
        )
    return part.replace(whole)


def _transfer(client: httpx.Client, file: RemoteFile, part: Path, progress: Progress) -> None:
    """Append what a part lacks; a connection that breaks is made again, at once if bytes came."""
    failures, most_bytes = 0, _size(part)
    for _ in range(_CONNECTIONS_MAX):
        if _size(part) == file.size_bytes:
            return
        try:
            _receive(client, file, part, progress)
        except httpx.TransportError:
            failures = 1 if _size(part) > most_bytes else failures + 1
            if failures == _ATTEMPTS:
                raise
            if failures > 1:
                time.sleep(_PAUSE_S)
        most_bytes = max(most_bytes, _size(part))
    raise httpx.ReadError(f"the connection broke {_CONNECTIONS_MAX} times")


def _receive(client: httpx.Client, file: RemoteFile, part: Path, progress: Progress) -> None:
    done = _size(part)
    headers = {"Accept-Encoding": "identity"}
    if 0 < done < file.size_bytes:
        headers["Range"] = f"bytes={done}-"
    with client.stream("GET", file.url, headers=headers) as response:
        response.raise_for_status()
        is_partial = response.status_code == httpx.codes.PARTIAL_CONTENT
        with part.open("ab" if is_partial else "wb") as target:
            for chunk in response.iter_raw():
                if target.tell() + len(chunk) > file.size_bytes:
                    target.truncate(0)
                    raise httpx.DecodingError("it is longer than it should be")
                target.write(chunk)
                progress(target.tell(), file.size_bytes)
            target.flush()
            os.fsync(target.fileno())
    if _size(part) < file.size_bytes:
        raise httpx.ReadError("it ended early")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
