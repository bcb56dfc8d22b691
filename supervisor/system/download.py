"""Downloads files of known size and digest, and files of pip's package index. Blocks.

A broken download resumes. A file is partial, under another name, until it is complete and its
digest is verified.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeVar

from attrs import define

from supervisor.errors import CorralError, DownloadFailed
from supervisor.system.files import sha256_of

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
PART: Final = ".part"
_RETRY: Final = "run the same command again"
_AGAIN: Final = "; it continues where it stopped"

_ATTEMPTS: Final = 5
_LONGEST_WAIT_S: Final = 8.0
_NOTICE_MIN_S: Final = 0.5
# If a server asks for a longer pause, tell the user instead of hanging silently.
ASKED_WAIT_MAX_S: Final = 60.0
# One download fails after so many breaks, with or without progress between them.
_BREAKS_MAX: Final = 1000
# A CDN does not send objects of more than 50 GB at once, but it sends ranges of them. Source:
# huggingface_hub, constants.py, MAX_HTTP_DOWNLOAD_SIZE; CloudFront's quotas.
RANGE_MAX_BYTES: Final = 16 * 1024**3


class Interruption(Exception):
    """A request broke, but another attempt may succeed; `reason` is a clause.

    The server may have asked for a pause of `wait_s`. `is_unresolved`: its name has no address, as
    without a network.
    """

    def __init__(
        self, reason: str, wait_s: float | None = None, *, is_unresolved: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_s = wait_s
        self.is_unresolved = is_unresolved


class Attempts:
    """Counts the attempts since the last progress."""

    def __init__(self) -> None:
        self._failed = 0
        self._breaks = 0
        self._has_progressed = False

    def note_progress(self) -> None:
        self._failed = 0
        self._has_progressed = True

    def wait_s(self, broken: Interruption) -> float | None:
        """Return the pause before the next attempt; None to give up."""
        self._failed += 1
        self._breaks += 1
        # A running download survives a gap in the network.
        is_offline = broken.is_unresolved and not self._has_progressed
        if is_offline or self._failed >= _ATTEMPTS or self._breaks >= _BREAKS_MAX:
            return None
        if broken.wait_s is None:
            return min(_LONGEST_WAIT_S, 2.0 ** (self._failed - 1))
        return broken.wait_s if broken.wait_s <= ASKED_WAIT_MAX_S else None


@define(eq=False, slots=False)
class Client(ABC):
    """Reaches servers: `sleep` waits between attempts, `notify` gets a sentence for each wait.

    One request of `fetch` asks for `range_max_bytes` at most.
    """

    _sleep: Callable[[float], None] = time.sleep
    notify: Callable[[str], None] = lambda _: None
    range_max_bytes: int = RANGE_MAX_BYTES

    @abstractmethod
    def stream(
        self, url: str, headers: Mapping[str, str], name: str
    ) -> AbstractContextManager[Any]:
        """Request a file; yield the response before its body arrives.

        Raises CorralError if the server refuses, Interruption if another attempt may succeed.
        """

    def next_step(self, broken: Interruption, kept: str) -> str:  # noqa: ARG002 (for the hub)
        """Return the hint of a request that broke too often; `kept` is its end."""
        return f"{_RETRY}{kept}"

    def retry(self, call: Callable[[Attempts], T], what: str, kept: str = "") -> T:
        """Repeat a call after interruptions.

        The call gets the attempts, to note its progress. `what` is the subject of the error, and
        `kept` the end of its hint. Raises DownloadFailed after too many without progress.
        """
        attempts = Attempts()
        while True:
            try:
                return call(attempts)
            except Interruption as broken:
                wait_s = attempts.wait_s(broken)
                if wait_s is None:
                    message = f"{what}: {broken.reason}"
                    raise DownloadFailed(message, self.next_step(broken, kept)) from broken
                if wait_s >= _NOTICE_MIN_S:
                    self.notify(f"{what}: {broken.reason}; trying again in {wait_s:.0f} s")
                self._sleep(wait_s)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str  # for messages
    url: str
    size_bytes: int
    digest: str = ""  # its SHA-256, or the SHA-1 of a git blob; empty if unknown
    tag: str = ""  # the entity tag of a file without digest; needed to resume


_CHUNK_BYTES: Final = 1024**2

# Receives a stage (`check`, `download`), bytes done, and bytes in all.
Progress = Callable[[str, int, int], None]


def fetch(
    file: RemoteFile,
    part: Path,
    target: Path,
    client: Client,
    progress: Progress,
    wrong: Callable[[str], CorralError],
) -> tuple[int, str]:
    """Complete the partial file `part`, verify it, and rename it to `target`.

    Args:
        progress: Receives stages, and in `check` the bytes read of an earlier partial file.
        wrong: Makes the error of a file that is not the expected one, from a clause that says why.

    Returns:
        The bytes received, and the file's digest.

    Raises:
        DownloadFailed: The download broke too often; the partial file stays.
        OSError: The file cannot be written, or the disk is full; the partial file stays.
    """
    with part.open("ab+", buffering=_CHUNK_BYTES) as content:
        found = _Part(file, content, progress)
        try:
            found.read_earlier(part.stat().st_size)
            while found.done_bytes < file.size_bytes:
                what = f"the download of {file.name} broke"
                client.retry(partial(found.receive, client), what, _AGAIN)
            found.verify()
        except _Wrong as error:
            part.unlink(missing_ok=True)
            raise wrong(str(error)) from None
        os.fsync(content.fileno())
        part.replace(target)
        return found.received_bytes, found.digest.hexdigest()


class _Wrong(Exception):
    """It is not the expected file; the text is a clause."""


class _Part:
    """The content of a partial file, and its digest."""

    def __init__(self, file: RemoteFile, content: IO[bytes], progress: Progress) -> None:
        self._file = file
        self._content = content
        self._progress = progress
        self.digest = _digest_for(file)
        self.done_bytes = self.received_bytes = 0

    def read_earlier(self, size_bytes: int) -> None:
        """Read the bytes that an earlier command received, unless they are of no use."""
        if size_bytes > self._file.size_bytes or not (self._file.digest or self._file.tag):
            self._restart()
            return
        self._content.seek(0)
        while chunk := self._content.read(min(_CHUNK_BYTES, size_bytes - self.done_bytes)):
            self._add(chunk, "check")

    def receive(self, client: Client, attempts: Attempts) -> None:
        """Request the next range; begins again if the server sends the whole file."""
        file = self._file
        last = min(self.done_bytes + client.range_max_bytes, file.size_bytes) - 1
        headers = {"Range": f"bytes={self.done_bytes}-{last}"}
        if file.tag and self.done_bytes:
            headers["If-Range"] = file.tag
        try:
            with client.stream(file.url, headers, file.name) as response:
                if response.status_code == HTTPStatus.OK:
                    self._restart()
                elif not self._is_next(response):
                    raise _Wrong("the server has a file of another size")
                for data in response.iter_raw():
                    if self.done_bytes + len(data) > file.size_bytes:
                        raise _Wrong("the server sends more than the hub lists")
                    self._content.write(data)
                    attempts.note_progress()
                    self.received_bytes += len(data)
                    self._add(data, "download")
        finally:
            self._content.flush()  # so that they survive this process
        if self.done_bytes <= last:
            raise Interruption("the connection ended early")

    def verify(self) -> None:
        if self._file.digest and self.digest.hexdigest() != self._file.digest:
            raise _Wrong("its digest differs")

    def _add(self, data: bytes, stage: str) -> None:
        self.digest.update(data)
        self.done_bytes += len(data)
        self._progress(stage, self.done_bytes, self._file.size_bytes)

    def _restart(self) -> None:
        self._content.seek(0)
        self._content.truncate()
        self.digest = _digest_for(self._file)
        self.done_bytes = 0

    def _is_next(self, response: Any) -> bool:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
        if found is None or response.status_code != HTTPStatus.PARTIAL_CONTENT:
            return False
        whole = {str(self._file.size_bytes), "*"}
        return int(found[1]) == self.done_bytes and found[2] in whole


def _digest_for(file: RemoteFile) -> Any:
    """Return a new digest of the kind of the file's own.

    A file in LFS has a SHA-256, any other the SHA-1 of a git blob. Source: gitformat-blob; the
    hub's field `blobId`.
    """
    if len(file.digest) != 40:
        return hashlib.sha256()
    found = hashlib.sha1(usedforsecurity=False)
    found.update(b"blob %d\0" % file.size_bytes)
    return found


class HttpClient(Client):
    """Servers that need no token; the httpx client follows redirects."""

    def __init__(self, client: httpx.Client, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(sleep)
        self._client = client

    @contextmanager
    def stream(self, url: str, headers: Mapping[str, str], name: str) -> Iterator[httpx.Response]:
        import httpx  # noqa: PLC0415 (0.1 s, and downloads from the hub do not need it)

        sent = {"Accept-Encoding": "identity", **headers}
        try:
            with self._client.stream("GET", url, headers=sent) as response:
                response.raise_for_status()
                yield response
        except httpx.TooManyRedirects as error:
            raise DownloadFailed(f"too many redirects while downloading {name}") from error
        except httpx.HTTPStatusError as error:
            answer = error.response
            raise DownloadFailed(
                f"{name} cannot be downloaded: {answer.url.host} answers "
                f"{answer.status_code} {answer.reason_phrase}",
                hint=_RETRY,
            ) from error
        except httpx.TransportError as error:
            raise Interruption(repr(error)) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            message = f"the download of {name} broke: {error!r}"
            raise DownloadFailed(message, hint=f"{_RETRY}{_AGAIN}") from error


def download(
    client: Client,
    file: RemoteFile,
    directory: Path,
    progress: Callable[[int, int], None],
    source: str,
) -> Path:
    """Download a file with a SHA-256 into a directory, unless it is there with the right one.

    `source` is the origin of the SHA-256, for messages. Raises DownloadFailed, and OSError if the
    directory cannot be written.
    """
    target = directory / file.name

    def show(stage: str, done_bytes: int, all_bytes: int) -> None:
        if stage == "download":
            progress(done_bytes, all_bytes)

    def wrong(_: str) -> DownloadFailed:
        return DownloadFailed(
            f"{file.name} is damaged: its SHA-256 is not that of {source}",
            hint=f"it was removed; {_RETRY}",
        )

    if not (target.exists() and sha256_of(target) == file.digest):
        fetch(file, directory / f"{file.name}{PART}", target, client, show, wrong)
    return target


# -P: files of the working directory are not imported.
_PIP: Final = (sys.executable, "-P", "-m", "pip")
# The default of `--index-url` in pip's help; no other option has a URL as its default.
_DEFAULT_INDEX: Final = re.compile(r"\(default (https?://[^\s()]{1,500})\)")
_JSON: Final = "application/vnd.pypi.simple.v1+json"
_PAGE_MAX_BYTES: Final = 16 * 1024**2


class PackageIndex:
    """The package index that pip is configured to use; `url` is None if pip names none."""

    def __init__(self, client: httpx.Client, url: str | None) -> None:
        self._client = client
        self.url = url

    def files(self, package: str) -> tuple[RemoteFile, ...]:
        """Return the files of a package; empty if the index does not list it as JSON.

        Files without a size or a SHA-256 are left out. Source: PEP 691, PEP 700, PEP 503 (names).
        """
        import httpx  # noqa: PLC0415 (as above)

        name = re.sub(r"[-_.]+", "-", package).lower()
        url = f"{(self.url or '').rstrip('/')}/{name}/"
        try:
            with self._client.stream("GET", url, headers={"Accept": _JSON}) as response:
                response.raise_for_status()
                page = b""
                for chunk in response.iter_bytes():
                    page += chunk
                    if len(page) > _PAGE_MAX_BYTES:
                        return ()
            return tuple(
                RemoteFile(
                    Path(file["filename"]).name,
                    str(response.url.join(file["url"])),
                    file["size"],
                    file["hashes"]["sha256"],
                )
                for file in json.loads(page)["files"]
                if file.get("size") and file["hashes"].get("sha256")
            )
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
            return ()

    def download(
        self, file: RemoteFile, directory: Path, progress: Callable[[int, int], None]
    ) -> Path:
        """Download a file, as `download` does."""
        return download(HttpClient(self._client), file, directory, progress, "the index")


@contextmanager
def package_index() -> Iterator[PackageIndex]:
    """Open the index of pip's settings, with the certificates of those."""
    import httpx  # noqa: PLC0415 (as above)

    pip, timeout = _pip_settings(), httpx.Timeout(30.0, connect=10.0)
    context = ssl.create_default_context(cafile=pip["cert"]) if "cert" in pip else True
    with httpx.Client(timeout=timeout, follow_redirects=True, verify=context) as client:
        yield PackageIndex(client, pip.get("index-url") or _default_index())


def download_wheel(
    requirement: str, directory: Path, size_max_bytes: int, progress: Callable[[int, int], None]
) -> None:
    """Download the wheel of `NAME==VERSION` into a directory, as `download` does.

    A `.part` file in the directory is resumed, and a wheel above `size_max_bytes` refused. Raises
    as `download`.
    """
    name, _, version = requirement.partition("==")
    with package_index() as index:
        wheels = (file for file in index.files(name) if file.name.endswith(".whl"))
        # Source: PEP 427.
        wheel = next((wheel for wheel in wheels if wheel.name.split("-")[1:2] == [version]), None)
        if wheel is None:
            pip_download(requirement, directory)
            return
        if wheel.size_bytes > size_max_bytes:
            raise DownloadFailed(f"{wheel.name} has {wheel.size_bytes} bytes: more than it may")
        index.download(wheel, directory, progress)


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
    argv = [*_PIP, *arguments]
    wide = {**os.environ, "COLUMNS": "1000"}  # lines are not broken
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=30, check=False, env=wide
        ).stdout
    except subprocess.TimeoutExpired:
        return ""


def pip_download(requirement: str, directory: Path) -> None:
    """Let pip download one wheel into a directory, which gets only complete files.

    Source: `pip download` moves finished files out of its own temporary directory. Raises
    DownloadFailed: pip failed; the message has its last lines.
    """
    argv = [*_PIP, "download", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), requirement]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=3600, check=False)
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(
            f"pip did not download {requirement} within an hour", hint=_RETRY
        ) from error
    if done.returncode:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise DownloadFailed(
            f"pip could not download {requirement}:\n{last_lines}",
            hint=f"check the network and pip's settings, then {_RETRY}",
        )
