"""Downloads files of known size and SHA-256, and wheels from pip's package index. Blocks.

A broken download resumes. The file is called `NAME.part` until it is complete and its hash is
verified. An existing file with the right hash is not downloaded again.

A wheel comes from the package index that pip is configured to use. pip downloads it itself if the
index has no JSON (PEP 691), is not reached by HTTP, or lacks the wheel: pip may have more sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from supervisor.errors import DownloadFailed

# The download fails after this many broken connections in a row that brought no byte.
_ATTEMPTS: Final = 4
_PAUSE_S = 2.0
_CONNECTIONS_MAX: Final = 100
PART: Final = ".part"
_RETRY: Final = "run the same command again"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file to download; `name` is valid as a local file name."""

    name: str
    url: str | httpx.URL
    sha256: str
    size_bytes: int


def download(
    client: httpx.Client, file: RemoteFile, directory: Path, progress: Progress, source: str
) -> Path:
    """Download a file into a directory, and resume an earlier partial download.

    Args:
        client: Follows redirects.
        directory: Gets the file and, until it is complete, the partial file.
        progress: Receives bytes done and bytes in all.
        source: The origin of the size and the SHA-256, for messages.

    Raises:
        DownloadFailed: The download broke, or the file's hash is wrong.
        OSError: The directory cannot be written.
    """
    whole = directory / file.name
    if whole.exists() and _digest(whole) == file.sha256:
        return whole
    part = directory / f"{file.name}{PART}"
    try:
        _transfer(client, file, part, progress)
    except httpx.TooManyRedirects as error:
        raise DownloadFailed(f"too many redirects while downloading {file.name}") from error
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
    """Complete a partial file; reconnect after a break, without a pause if bytes came."""
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


# The default of `--index-url` in pip's help; no other option has a URL as its default.
_DEFAULT_INDEX: Final = re.compile(r"\(default (https?://[^\s()]{1,500})\)")
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_PAGE_MAX_BYTES: Final = 16 * 1024**2
_PIP_DOWNLOAD_TIMEOUT_S: Final = 3600
_PIP_TIMEOUT_S: Final = 30
_PIP_LINES_SHOWN: Final = 3


def download_wheel(
    requirement: str, directory: Path, size_max_bytes: int, progress: Progress
) -> None:
    """Download the wheel of `NAME==VERSION` into a directory, as `download` does.

    Args:
        directory: Gets the wheel; a `.part` file in it is resumed.
        size_max_bytes: A larger wheel is refused.
        progress: Receives bytes done and bytes in all.

    Raises:
        DownloadFailed: The download broke, or the wheel is too large or its hash is wrong.
        OSError: The directory cannot be written.
    """
    pip = _pip_settings()
    context = ssl.create_default_context(cafile=pip["cert"]) if "cert" in pip else True
    with httpx.Client(timeout=_TIMEOUT, follow_redirects=True, verify=context) as client:
        index = pip.get("index-url") or _default_index()
        wheel = _find(client, index, requirement) if index else None
        if wheel is None:
            pip_download(requirement, directory)
            return
        if wheel.size_bytes > size_max_bytes:
            raise DownloadFailed(f"{wheel.name} has {wheel.size_bytes} bytes: more than it may")
        download(client, wheel, directory, progress, "the index")


def _find(client: httpx.Client, index: str, requirement: str) -> RemoteFile | None:
    """Return the wheel of a requirement; None if the index does not list it as JSON.

    Source: PEP 691, PEP 503 (names), PEP 427 (file names).
    """
    name, _, version = requirement.partition("==")
    url = f"{index.rstrip('/')}/{re.sub(r'[-_.]+', '-', name).lower()}/"
    try:
        with client.stream("GET", url, headers={"Accept": _JSON}) as response:
            response.raise_for_status()
            page = b""
            for chunk in response.iter_bytes():
                page += chunk
                if len(page) > _PAGE_MAX_BYTES:
                    return None
        wheels = (file for file in json.loads(page)["files"] if file["filename"].endswith(".whl"))
        found = next(wheel for wheel in wheels if wheel["filename"].split("-")[1] == version)
        return RemoteFile(
            Path(found["filename"]).name,
            response.url.join(found["url"]),
            found["hashes"]["sha256"],
            found["size"],
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, StopIteration):
        return None


def _pip_settings() -> Mapping[str, str]:
    """Return pip's settings, of which the environment's win; empty if pip times out."""
    pairs = [line.partition("=") for line in _pip("config", "list").splitlines()]
    ranked = sorted(pairs, key=lambda pair: pair[0].startswith(":env:"))
    return {key.rpartition(".")[2]: "".join(shlex.split(value)) for key, _, value in ranked}


def _default_index() -> str | None:
    """Return the index that pip uses by default; None if its help does not name it."""
    found = _DEFAULT_INDEX.search(_pip("download", "--help"))
    return found[1] if found else None


def _pip(*arguments: str) -> str:
    argv = [sys.executable, "-m", "pip", *arguments]
    wide = {**os.environ, "COLUMNS": "1000"}  # lines are not broken
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False, env=wide
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def pip_download(requirement: str, directory: Path) -> None:
    """Let pip download one wheel into a directory, which gets only complete files.

    Source: `pip download` moves finished files out of its own temporary directory.

    Raises:
        DownloadFailed: pip failed; the message has its last lines.
    """
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=_PIP_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(
            f"pip did not download {requirement} within an hour", hint=_RETRY
        ) from error
    if done.returncode:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-_PIP_LINES_SHOWN:])
        raise DownloadFailed(
            f"pip could not download {requirement}:\n{last_lines}",
            hint=f"check the network and pip's settings, then {_RETRY}",
        )
