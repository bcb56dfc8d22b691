"""Reads llama.cpp's releases from GitHub's API, or a mirror of it. Blocks.

llama.cpp publishes a build several times a day, as a prerelease with the tag bNNNNN. Its latest
release proper has a version such as v0.5.0 and no build of its own: its file `nightly-tag.txt`
names the build that it is. Source: llama.cpp pull request 27485; its releases of September 2026.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from supervisor import __version__
from supervisor.errors import DownloadFailed, EngineMissing
from supervisor.output import duration
from supervisor.releases.release import Asset, Release, is_tag, read_release

_GITHUB: Final = "api.github.com"
_TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
_ANSWER_MAX_BYTES: Final = 16 * 1024**2
_POINTER: Final = "nightly-tag.txt"
_POINTER_MAX_BYTES: Final = 64
_LISTED: Final = 20
_MIRROR: Final = "set [releases] api to a mirror of llama.cpp's releases"


def new_client() -> httpx.Client:
    agent = {"User-Agent": f"llama-corral/{__version__}"}
    return httpx.Client(timeout=_TIMEOUT, follow_redirects=True, max_redirects=5, headers=agent)


class ReleaseApi:
    """The releases at an address.

    Args:
        client: Follows redirects.
        url: Of the list of releases.
        environ: `GITHUB_TOKEN` is sent to GitHub, which then answers more often; to no mirror.
        now: The time, to say how long a limit lasts.
    """

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        environ: Mapping[str, str] = os.environ,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client = client
        self._url = url
        self._host = urlsplit(url).netloc
        self._now = now
        self._headers = {"Accept": "application/vnd.github+json"}
        if (token := environ.get("GITHUB_TOKEN")) and url.startswith(f"https://{_GITHUB}/"):
            self._headers["Authorization"] = f"Bearer {token}"

    def find(self, wanted: str) -> Release:
        """Return the release of a build.

        Args:
            wanted: A tag such as b11434 or v0.5.0; `stable` for the build of the latest version,
                `newest` for the newest build.

        Raises:
            EngineMissing: There is none of this tag.
            DownloadFailed: The releases cannot be read.
        """
        if wanted == "newest":
            return next(self._builds())
        found = self._release("latest" if wanted == "stable" else f"tags/{wanted}", wanted)
        return found if found.build else self._release(f"tags/{self._build_of(found)}", wanted)

    def _builds(self) -> Iterator[Release]:
        """Yield builds, the newest first; those whose files are still being uploaded are not."""
        listed = self._get(f"{self._url}?per_page={_LISTED}", _ANSWER_MAX_BYTES)
        found = [self._read(one) for one in self._json(listed, list) if not _is_draft(one)]
        yield from sorted(
            (one for one in found if one.build and any(asset.parsed for asset in one.assets)),
            key=lambda one: -(one.build or 0),
        )
        raise EngineMissing(f"{self._host} lists no build of llama.cpp", hint=_MIRROR)

    def _release(self, path: str, wanted: str) -> Release:
        content = self._get(f"{self._url}/{path}", _ANSWER_MAX_BYTES, wanted)
        return self._read(self._json(content, dict))

    def _build_of(self, version: Release) -> str:
        """Return the tag of the build that a version is."""
        pointer = next((one for one in version.assets if one.name == _POINTER), None)
        if pointer is None:
            raise EngineMissing(
                f"llama.cpp {version.tag} does not say which build it is",
                hint="name a build such as b11434, or newest",
            )
        tag = self._pointer(pointer)
        if not is_tag(tag) or tag.startswith("v"):
            raise self._strange(f"{_POINTER} of {version.tag} names no build")
        return tag

    def _pointer(self, pointer: Asset) -> str:
        content = self._get(pointer.url, _POINTER_MAX_BYTES)
        return content.decode("ascii", "replace").strip()

    def _read(self, found: Any) -> Release:
        try:
            return read_release(found)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self._strange("it describes no release") from error

    def _json(self, content: bytes, kind: type) -> Any:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self._strange("it is not JSON") from error
        if not isinstance(found, kind):
            raise self._strange("it describes no releases")
        return found

    def _strange(self, reason: str) -> DownloadFailed:
        return DownloadFailed(
            f"the answer of {self._host} is not GitHub's: {reason}", hint=f"check it, or {_MIRROR}"
        )

    def _get(self, url: str, limit_bytes: int, wanted: str = "") -> bytes:
        is_api = url.startswith(self._url)
        try:
            with self._client.stream(
                "GET", url, headers=self._headers if is_api else {}
            ) as response:
                if not response.is_success:
                    raise self._refusal(response, wanted)
                content = bytearray()
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > limit_bytes:
                        raise self._strange(f"it has more than {limit_bytes} bytes")
                return bytes(content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DownloadFailed(
                f"{urlsplit(url).netloc} cannot be reached: {error}",
                hint=f"check the network and its proxy, or {_MIRROR}",
            ) from error

    def _refusal(self, response: httpx.Response, wanted: str) -> DownloadFailed | EngineMissing:
        status, host = response.status_code, response.url.host
        if status == httpx.codes.NOT_FOUND and wanted:
            return EngineMissing(
                f"llama.cpp has no release {wanted}",
                hint="builds are named b11434, versions v0.5.0; newest is the newest build",
            )
        if wait_s := _wait_s(response, self._now()):
            return DownloadFailed(
                f"{host} answers no more requests from this address for {duration(wait_s)}",
                hint=f"set GITHUB_TOKEN to a token of any GitHub account, or {_MIRROR}",
            )
        if status == httpx.codes.UNAUTHORIZED:
            return DownloadFailed(f"{host} refuses the token in GITHUB_TOKEN", hint="renew it")
        return DownloadFailed(
            f"{host} answers {status} {response.reason_phrase}", hint="run the same command again"
        )


def _is_draft(found: Any) -> bool:
    return isinstance(found, Mapping) and bool(found.get("draft"))


def _wait_s(response: httpx.Response, now: datetime) -> float | None:
    """Return for how long requests are refused; None if they are not for their number.

    Source: GitHub's documentation, "Rate limits for the REST API".
    """
    headers = response.headers
    if response.status_code not in {httpx.codes.FORBIDDEN, httpx.codes.TOO_MANY_REQUESTS}:
        return None
    if (after := headers.get("Retry-After", "")).isdecimal():
        return float(after)
    reset = headers.get("X-RateLimit-Reset", "")
    if headers.get("X-RateLimit-Remaining") == "0" and reset.isdecimal():
        return max(1.0, int(reset) - now.timestamp())
    return 60.0 if response.status_code == httpx.codes.TOO_MANY_REQUESTS else None
