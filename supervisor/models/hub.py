"""Client of the Hugging Face hub and other file servers, with retries and translated errors.

Requests use huggingface_hub's session, which has the user's proxy, certificates, token and offline
mode (HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE).

Source: huggingface_hub, utils/_http.py, hf_raise_for_status, for X-Error-Code and X-Error-Message.
Without a token, the hub answers 401 for a repository that does not exist.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from proxy.common.toml_text import table_beside

# huggingface_hub reads it while it is imported.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

import httpx2
from huggingface_hub import ModelInfo, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers, get_session

from supervisor import __version__, errors
from supervisor.models.reference import without_secrets
from supervisor.models.repository import FoundRepository, RemoteFile, Repository
from supervisor.system.download import (
    ASKED_WAIT_MAX_S,
    RANGE_MAX_BYTES,
    Attempts,
    Client,
    Interruption,
)

_TRANSIENT: Final = frozenset({408, 429, 500, 502, 503, 504})
_TOKENS: Final = "https://huggingface.co/settings/tokens"
_TEXT_MAX: Final = 200


def _hub_error(answer: httpx2.Response, repo: str, what: str, page: str) -> errors.CorralError:
    """Return the error of a repository; `what` is the requested part, `page` its URL."""
    status, code = answer.status_code, answer.headers.get("x-error-code", "")
    has_token = "authorization" in answer.request.headers
    rows = table_beside(__file__)
    if code not in rows:
        code = "bad token" if status == 401 and has_token else "denied"
        code = {404: "RepoNotFound", 401: code, 403: code}.get(status, "other")
    access = f", then set HF_TOKEN to a token from {_TOKENS}"
    private = "if it is private, set HF_TOKEN"
    if has_token:
        access = "; the account of your token has no access yet"
        private = "your token has no access to it if it is private"
    text = answer.headers.get("x-error-message", "")[:_TEXT_MAX]
    texts = {"repo": repo, "what": what, "page": page, "status": status, "access": access}
    texts |= {"private": private, "said": f": {text}" if text else ""}
    row = rows[code]
    kind: type[errors.CorralError] = getattr(errors, row["error"])
    return kind(row["message"].format_map(texts), hint=row["hint"].format_map(texts))


def _transient(status: int, headers: Mapping[str, str]) -> Interruption:
    wait_s = _requested_wait_s(headers)
    if status != 429:
        return Interruption(f"the server answered {status}", wait_s)
    reason = "the server answered 429, too many requests"
    if wait_s and wait_s > ASKED_WAIT_MAX_S:
        reason += f", and asks to wait {wait_s:.0f} s"
    return Interruption(reason, wait_s)


def _requested_wait_s(headers: Mapping[str, str]) -> float | None:
    """Source: RFC 9110, Retry-After; the hub's "Rate limits", whose header is `"api";r=0;t=55`."""
    if (asked := headers.get("retry-after", "")).isdecimal():
        return float(asked)
    found = re.search(r";\s*r=0\s*;\s*t=(\d{1,6})(?!\d)", headers.get("ratelimit", ""))
    return float(found[1]) if found else None


_TIMEOUT: Final = httpx2.Timeout(30.0, connect=10.0)
_AGENT: Final = "llama-corral"


def is_offline() -> bool:
    return bool(constants.HF_HUB_OFFLINE)


def cache_root() -> Path:
    """Return the user's Hugging Face cache: HF_HUB_CACHE, or below HF_HOME."""
    return Path(constants.HF_HUB_CACHE)


@contextmanager
def stream(
    url: str, endpoint: str, name: str, headers: Mapping[str, str], parameters: Mapping[str, Any]
) -> Iterator[httpx2.Response]:
    """Request a URL, and yield the response before its body arrives.

    Only the hub gets the token; the session drops it at a redirect to another server. `name` is the
    repository or file, for messages. Raises as `Client.stream`.
    """
    sent = {**_headers(url, endpoint), **headers}
    with (
        _transport(url),
        get_session().stream(
            "GET", url, params=dict(parameters) or None, headers=sent, timeout=_TIMEOUT
        ) as response,
    ):
        if response.status_code not in {200, 206, 416}:
            raise _refusal(response, endpoint, name)
        yield response


def _headers(url: str, endpoint: str) -> dict[str, str]:
    token = None if url.startswith(f"{endpoint}/") else False
    try:
        found = build_hf_headers(token=token, library_name=_AGENT, library_version=__version__)
    except (OSError, ValueError) as error:
        raise errors.AccessDenied(
            f"the token of the hub cannot be read: {error}",
            hint="check HF_HOME and HF_TOKEN_PATH, or set HF_TOKEN",
        ) from error
    return dict(found)


def _refusal(
    answer: httpx2.Response, endpoint: str, name: str
) -> errors.CorralError | Interruption:
    """Return the error to raise; an Interruption if another attempt may succeed."""
    status = answer.status_code
    first, last = str(answer.history[0].url if answer.history else answer.url), str(answer.url)
    is_hub = first.startswith(f"{endpoint}/")
    if is_hub and not last.startswith(f"{endpoint}/"):
        # The link to the download server has expired; the hub gives a new one.
        return Interruption(f"the download server answered {status}")
    if status in _TRANSIENT:
        return _transient(status, answer.headers)
    if not is_hub:
        page = without_secrets(first)
        kind = errors.NoSuchModel if status in {404, 410} else errors.DownloadFailed
        return kind(f"the server answered {status} for {page}", hint="check the URL in a browser")
    found = re.match(r"/(?:api/models/)?([^/]+/[^/]+)(?:/|$)", first.removeprefix(endpoint))
    repo = found[1] if found else name
    return _hub_error(answer, repo, name, f"{endpoint}/{repo}")


@contextmanager
def _transport(url: str) -> Iterator[None]:
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise errors.DownloadFailed(
            f"offline mode is on, so {url} was not requested", hint="unset HF_HUB_OFFLINE"
        ) from error
    except UnicodeEncodeError as error:
        raise errors.HubAccessDenied(
            "the token of the hub has characters that no token has", hint="set HF_TOKEN again"
        ) from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        raise errors.DownloadFailed(
            f"{url} cannot be requested: {error}", hint="check HF_ENDPOINT"
        ) from error
    except httpx2.TooManyRedirects as error:
        raise errors.DownloadFailed(
            f"too many redirects from {url}", hint="check the URL"
        ) from error
    except httpx2.HTTPError as error:
        if _is_unresolved(error):
            reason = f"the name {urlsplit(url).hostname} has no address ({error})"
            raise Interruption(reason, is_unresolved=True) from error
        raise Interruption(str(error) or type(error).__name__) from error


def _is_unresolved(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def repository(body: bytes, repo: str, revision: str) -> Repository:
    """Parse the hub's description of a repository; raises DownloadFailed."""
    with _translate_shape_errors(repo):
        info = ModelInfo(**json.loads(body))
        files = [
            RemoteFile(
                sibling.rfilename,
                sibling.size or 0,
                (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "",
            )
            for sibling in info.siblings or ()
            if sibling.rfilename.lower().endswith(".gguf")
        ]
        return Repository(repo, revision, info.sha or "", {file.path: file for file in files})


def parse_search(body: bytes, words: str) -> tuple[FoundRepository, ...]:
    """Parse the result of a search; raises DownloadFailed."""
    with _translate_shape_errors(f"a search for {words}"):
        return tuple(_found_repository(ModelInfo(**model)) for model in json.loads(body))


def _found_repository(info: ModelInfo) -> FoundRepository:
    total = (info.gguf or {}).get("total")
    return FoundRepository(
        repo=info.id,
        downloads=info.downloads or 0,
        likes=info.likes or 0,
        parameters=total if isinstance(total, int) else None,
        date=info.last_modified.date().isoformat() if info.last_modified else "",
        is_gated=bool(info.gated),
    )


@contextmanager
def _translate_shape_errors(what: str) -> Iterator[None]:
    """Raise DownloadFailed for an answer of an unexpected shape."""
    try:
        yield
    except errors.CorralError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise errors.DownloadFailed(
            f"the answer about {what} is not an answer of a Hugging Face hub",
            hint="check HF_ENDPOINT, and whether a proxy answers in its place",
        ) from error


# The list of a repository with 10 000 files has some 4 MB.
_ANSWER_MAX_BYTES: Final = 16 * 1024**2
_SEARCHED: Final = ("downloads", "likes", "lastModified", "gated", "gguf")


class HubClient(Client):
    """The hub at an endpoint. `endpoint` is its URL; None for HF_ENDPOINT, or huggingface.co."""

    def __init__(
        self,
        endpoint: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        notify: Callable[[str], None] = lambda _: None,
        range_max_bytes: int = RANGE_MAX_BYTES,
    ) -> None:
        super().__init__(sleep, notify, range_max_bytes)
        self.endpoint = (endpoint or str(constants.ENDPOINT)).rstrip("/")

    def repository(self, repo: str, revision: str) -> Repository:
        """List the GGUF files of a repository.

        Raises NoSuchModel or HubAccessDenied if it is missing or not visible, or DownloadFailed.
        """
        path = f"/api/models/{repo}/revision/{quote(revision, safe='')}"
        return repository(self._get(path, {"blobs": "true"}, repo), repo, revision)

    def search(self, words: str, limit: int) -> tuple[FoundRepository, ...]:
        """Find repositories of GGUF files, the most downloaded first; raises as `repository`."""
        asked = {"search": words, "filter": "gguf", "sort": "downloads", "limit": limit}
        body = self._get("/api/models", {**asked, "expand": _SEARCHED}, words)
        return parse_search(body, words)[:limit]

    def file_url(self, repository: Repository, path: str) -> str:
        return f"{self.endpoint}/{repository.repo}/resolve/{repository.commit}/{quote(path)}"

    def describe(self, url: str, name: str) -> tuple[int, str]:
        """Return the size and the strong entity tag of a file; raises as `stream` and `retry`."""

        def attempt(_: Attempts) -> tuple[int, str]:
            with self.stream(url, {"range": "bytes=0-0"}, name) as response:
                whole = response.headers.get("content-range", "").rpartition("/")[2]
                length = whole or response.headers.get("content-length", "")
                tag = response.headers.get("etag", "")
                is_strong = tag.startswith('"')
                return (int(length) if length.isdecimal() else 0), tag if is_strong else ""

        return self.retry(attempt, f"cannot read {url}")

    @contextmanager
    def stream(self, url: str, headers: Mapping[str, str], name: str) -> Iterator[Any]:
        """Request a file; raises as `hub.stream`."""
        wanted = {"accept-encoding": "identity", **headers}
        with stream(url, self.endpoint, name, wanted, {}) as response:
            yield response

    def next_step(self, broken: Interruption, kept: str) -> str:
        if broken.is_unresolved:
            return f"check the network, or HF_ENDPOINT; the same command tries again{kept}"
        if broken.wait_s:
            then = "requests with HF_TOKEN have a higher limit"
            return f"run the same command again in {broken.wait_s:.0f} s{kept}; {then}"
        return f"check the network, then run the same command again{kept}"

    def _get(self, path: str, parameters: Mapping[str, Any], what: str) -> bytes:
        url = f"{self.endpoint}{path}"

        def attempt(_: Attempts) -> bytes:
            body = b""
            with stream(url, self.endpoint, what, {}, parameters) as response:
                for piece in response.iter_bytes():
                    body += piece
                    if len(body) > _ANSWER_MAX_BYTES:
                        raise errors.DownloadFailed(f"the hub's answer about {what} does not end")
            return body

        return self.retry(attempt, f"cannot read {what} from {self.endpoint}")
