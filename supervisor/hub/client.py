"""Requests to the hub, through huggingface_hub's session.

That session has the user's proxy, certificates, token and offline mode (HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE). Files are transferred in transfer.py: huggingface_hub 2.x begins a file
again after an interruption, and checks no digest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote

# Read while it is imported.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import httpx2
from huggingface_hub import ModelInfo, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, get_session

from supervisor import __version__
from supervisor.errors import CorralError, DownloadFailed
from supervisor.hub.refusal import Asked, refusal
from supervisor.hub.repository import FoundRepository, RemoteFile, Repository
from supervisor.hub.retry import Attempts, Interruption

_TIMEOUT: Final = httpx2.Timeout(30.0, connect=10.0)
_NOTICE_MIN_S: Final = 0.5
T = TypeVar("T")


def is_offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE)


def cache_root() -> Path:
    """The Hugging Face cache of this user: HF_HUB_CACHE, or below HF_HOME."""
    return Path(constants.HF_HUB_CACHE)


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
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        self._sleep = sleep
        self.notify = notify

    def repository(self, repo: str, revision: str) -> Repository:
        """List the GGUF files of a repository.

        Raises:
            NoSuchModel, HubAccessDenied: It cannot be seen.
            DownloadFailed: The hub cannot be reached, or its answer is not understood.
        """
        path = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        with _readable(repo):
            info = ModelInfo(**self._get_json(path, {"blobs": "true"}, repo))
            files = [
                RemoteFile(one.rfilename, one.size or 0, _digest(one))
                for one in info.siblings or ()
                if one.rfilename.lower().endswith(".gguf")
            ]
            return Repository(repo, revision, info.sha or "", {one.path: one for one in files})

    def search(self, words: str, limit: int) -> tuple[FoundRepository, ...]:
        """Find repositories of GGUF files, the most downloaded first; raises as `repository`."""
        wanted = ("downloads", "likes", "lastModified", "gated", "gguf")
        parameters = {"search": words, "filter": "gguf", "sort": "downloads", "limit": limit}
        with _readable(f"a search for {words}"):
            found = self._get_json("/api/models", {**parameters, "expand": wanted}, words)
            return tuple(_found(ModelInfo(**one)) for one in found[:limit])

    def file_url(self, repository: Repository, path: str) -> str:
        return f"{self.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(path)}"

    def describe(self, url: str, name: str) -> tuple[int, str]:
        """Return the size and the entity tag of a file; raises as `stream` and `retried`."""

        def attempt(_: Attempts) -> tuple[int, str]:
            with self.stream(url, {"range": "bytes=0-0"}, name) as response:
                whole = response.headers.get("content-range", "").rpartition("/")[2]
                tag = response.headers.get("etag", "")
                is_strong = tag.startswith('"')
                length = whole or response.headers.get("content-length", "")
                return (int(length) if length.isdecimal() else 0), tag if is_strong else ""

        return self.retried(attempt, f"cannot read {url}")

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
                    raise DownloadFailed(
                        f"{what}: {broken.reason}", _next_step(broken, kept)
                    ) from broken
                if wait_s >= _NOTICE_MIN_S:
                    self.notify(f"{what}: {broken.reason}; trying again in {wait_s:.0f} s")
                self._sleep(wait_s)

    @contextmanager
    def stream(self, url: str, headers: Mapping[str, str], asked_of: str) -> Iterator[Any]:
        """Request a file; its body is read with `chunks`.

        The token goes to the hub alone: the session drops it when it is redirected elsewhere.

        Raises:
            Interruption: Another attempt may succeed.
            CorralError: The server refuses.
        """
        is_hub = url.startswith(f"{self.endpoint}/")
        own = self._headers() if is_hub else _headers_elsewhere()
        sent = {**own, "accept-encoding": "identity", **headers}
        asked = self._asked(asked_of, sent, url)
        with (
            _transport(url),
            get_session().stream("GET", url, headers=sent, timeout=_TIMEOUT) as response,
        ):
            if response.status_code not in {200, 206, 416}:
                raise refusal(response.status_code, response.headers, asked)
            yield response

    def _get_json(self, path: str, parameters: Mapping[str, Any], what: str) -> Any:
        url, sent = f"{self.endpoint}{path}", self._headers()

        def request(_: Attempts) -> Any:
            with _transport(url):
                answer = get_session().get(
                    url, params=dict(parameters), headers=sent, timeout=_TIMEOUT
                )
            if answer.status_code != 200:
                raise refusal(answer.status_code, answer.headers, self._asked(what, sent, url))
            return answer.json()

        return self.retried(request, f"cannot read {what} from {self.endpoint}")

    @staticmethod
    def _headers() -> dict[str, str]:
        return dict(build_hf_headers(library_name="llama-corral", library_version=__version__))

    def _asked(self, what: str, sent: Mapping[str, str], url: str) -> Asked:
        page = f"{self.endpoint}/{what}" if url.startswith(self.endpoint) else url
        return Asked(what, page, "authorization" in sent)


def _found(info: ModelInfo) -> FoundRepository:
    total = (info.gguf or {}).get("total")
    return FoundRepository(
        repo=info.id,
        downloads=info.downloads or 0,
        likes=info.likes or 0,
        parameters=total if isinstance(total, int) else None,
        date=info.last_modified.date().isoformat() if info.last_modified else "",
        is_gated=bool(info.gated),
    )


def _digest(file: RepoSibling) -> str:
    return (file.lfs.sha256 if file.lfs else file.blob_id) or ""


def _headers_elsewhere() -> dict[str, str]:
    return {"user-agent": f"llama-corral/{__version__}"}


def _next_step(broken: Interruption, kept: str) -> str:
    if broken.wait_s:
        then = "requests with HF_TOKEN have a higher limit"
        return f"run the same command again in {broken.wait_s:.0f} s{kept}; {then}"
    return f"check the network, then run the same command again{kept}"


@contextmanager
def _transport(url: str) -> Iterator[None]:
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise DownloadFailed(
            f"offline mode is on, so {url} was not requested", hint="unset HF_HUB_OFFLINE"
        ) from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise DownloadFailed(
            f"{url} cannot be requested: {error}", hint="check HF_ENDPOINT"
        ) from error
    except httpx2.TooManyRedirects as error:
        raise DownloadFailed(f"{url} redirects without an end") from error
    except httpx2.HTTPError as error:
        raise Interruption(str(error) or type(error).__name__) from error


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Turn what goes wrong with an answer of another shape into one error."""
    try:
        yield
    except CorralError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DownloadFailed(
            f"the answer about {what} is not one of a Hugging Face hub",
            hint="check HF_ENDPOINT, and whether a proxy answers in its place",
        ) from error
