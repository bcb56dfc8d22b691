"""The hub: what it has, and the bytes of its files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar
from urllib.parse import quote

from supervisor.errors import DownloadFailed
from supervisor.hub import answers, session
from supervisor.hub.repository import FoundRepository, Repository
from supervisor.hub.retry import Attempts, Interruption

_NOTICE_MIN_S: Final = 0.5
# The list of a repository with 10 000 files has some 4 MB.
_ANSWER_MAX_BYTES: Final = 16 * 1024**2
_SEARCHED: Final = ("downloads", "likes", "lastModified", "gated", "gguf")
T = TypeVar("T")


class HubClient:
    """The hub at an endpoint.

    Args:
        endpoint: Its URL; unset: HF_ENDPOINT, or huggingface.co.
        sleep: Waits between attempts.
        notify: Receives a sentence for each wait.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.endpoint = (endpoint or session.default_endpoint()).rstrip("/")
        self.notify = notify
        self._sleep = sleep

    def repository(self, repo: str, revision: str) -> Repository:
        """List the GGUF files of a repository.

        Raises:
            NoSuchModel, HubAccessDenied: It cannot be seen.
            DownloadFailed: The hub cannot be reached, or its answer is not understood.
        """
        path = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        body = self._get(path, {"blobs": "true"}, repo)
        return answers.repository(body, repo, revision)

    def search(self, words: str, limit: int) -> tuple[FoundRepository, ...]:
        """Find repositories of GGUF files, the most downloaded first; raises as `repository`."""
        asked = {"search": words, "filter": "gguf", "sort": "downloads", "limit": limit}
        body = self._get("/api/models", {**asked, "expand": _SEARCHED}, words)
        return answers.found(body, words)[:limit]

    def file_url(self, repository: Repository, path: str) -> str:
        return f"{self.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(path)}"

    def describe(self, url: str, name: str) -> tuple[int, str]:
        """Return the size and the entity tag of a file; raises as `stream` and `retried`."""

        def attempt(_: Attempts) -> tuple[int, str]:
            with self.stream(url, {"range": "bytes=0-0"}, name) as response:
                whole = response.headers.get("content-range", "").rpartition("/")[2]
                length = whole or response.headers.get("content-length", "")
                tag = response.headers.get("etag", "")
                is_strong = tag.startswith('"')
                return (int(length) if length.isdecimal() else 0), tag if is_strong else ""

        return self.retried(attempt, f"cannot read {url}")

    @contextmanager
    def stream(self, url: str, headers: Mapping[str, str], name: str) -> Iterator[Any]:
        """Request a file; raises as session.stream."""
        wanted = {"accept-encoding": "identity", **headers}
        with session.stream(url, self.endpoint, name, wanted, {}) as response:
            yield response

    def retried(self, call: Callable[[Attempts], T], what: str, kept: str = "") -> T:
        """Call until it is not interrupted, or too often without progress.

        Args:
            call: Is given the attempts, to note its progress.
            what: The subject of the error.
            kept: What the error's hint adds.

        Raises:
            DownloadFailed: It was interrupted too often.
        """
        attempts = Attempts()
        while True:
            try:
                return call(attempts)
            except Interruption as broken:
                wait_s = attempts.wait_s(broken)
                if wait_s is None:
                    message = f"{what}: {broken.reason}"
                    raise DownloadFailed(message, _next_step(broken, kept)) from broken
                if wait_s >= _NOTICE_MIN_S:
                    self.notify(f"{what}: {broken.reason}; trying again in {wait_s:.0f} s")
                self._sleep(wait_s)

    def _get(self, path: str, parameters: Mapping[str, Any], what: str) -> bytes:
        """Return the body of an answer of the API."""
        url = f"{self.endpoint}{path}"

        def attempt(_: Attempts) -> bytes:
            body = b""
            with session.stream(url, self.endpoint, what, {}, parameters) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > _ANSWER_MAX_BYTES:
                        raise DownloadFailed(f"the hub's answer about {what} does not end")
            return body

        return self.retried(attempt, f"cannot read {what} from {self.endpoint}")


def _next_step(broken: Interruption, kept: str) -> str:
    if broken.is_unresolved:
        return f"check the network, or HF_ENDPOINT; the same command tries again{kept}"
    if broken.wait_s:
        then = "requests with HF_TOKEN have a higher limit"
        return f"run the same command again in {broken.wait_s:.0f} s{kept}; {then}"
    return f"check the network, then run the same command again{kept}"
