"""Reads llama.cpp's releases from GitHub's API or its mirror. Blocks.

llama.cpp publishes builds several times a day, as prereleases with tags such as b11434. Its latest
full release has a version such as v0.5.0 and no files of a build; its file `nightly-tag.txt` names
the build. Source: llama.cpp pull request 27485; its releases of September 2026.

The name of a file tells its system, processor and variant:

    llama-b11434-bin-ubuntu-x64.tar.gz                     CPU, Linux
    llama-b11434-bin-ubuntu-vulkan-arm64.tar.gz
    llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz           which needs these libraries:
    cudart-llama-b11434-bin-ubuntu-cuda-13.4-x64.tar.gz
    llama-b11434-bin-macos-arm64.tar.gz                    Metal
    llama-b4000-bin-ubuntu-x64.zip                         an old one

Source: llama.cpp, .github/workflows/release.yml, and the files of b4000, b10621 and b11101.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from supervisor import __version__
from supervisor.errors import DownloadFailed, EngineMissing
from supervisor.output import duration

_NAME: Final = re.compile(
    r"(?P<runtime>cudart-)?llama-(?P<tag>b\d{1,9})-bin-(?P<system>ubuntu|macos)-"
    r"(?:(?P<variant>[a-z]{2,16})-(?:(?P<version>[a-z0-9.]{1,16})-)?)?"
    r"(?P<processor>x64|arm64|s390x)\.(?:tar\.gz|zip)"
)


_TAG: Final = re.compile(r"b(\d{1,9})")
_VERSION: Final = re.compile(r"v\d{1,4}(\.\d{1,6}){1,3}")
_SHA256: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of a release for Linux (`ubuntu`) or macOS."""

    name: str
    url: str
    size_bytes: int
    sha256: str | None  # in hex; None if the API lacks it, as for releases before June 2025
    tag: str
    system: str
    processor: str
    variant: str  # the backend that it computes with: `cpu`, `metal`, `vulkan`, `cuda`, `rocm`, …
    version: str = ""  # the backend's version, such as `13.4`, or empty
    is_runtime: bool = False  # whether it has only libraries that another file needs

    @property
    def full_variant(self) -> str:
        return "-".join(filter(None, (self.variant, self.version)))

    @property
    def release(self) -> tuple[int, ...]:
        """The version in numbers, for comparisons; empty without a version."""
        return tuple(int(part) for part in self.version.split(".") if part.isdecimal())


def parse(name: str, url: str = "", size_bytes: int = 0, sha256: str | None = None) -> Asset | None:
    """Parse the name of a file; None for files of other kinds and for other systems."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    tag, system, variant, version, processor = found.group(
        "tag", "system", "variant", "version", "processor"
    )
    variant = variant or ("metal" if (system, processor) == ("macos", "arm64") else "cpu")
    is_runtime = bool(found["runtime"])
    place = (tag, system, processor)
    return Asset(name, url, size_bytes, sha256, *place, variant, version or "", is_runtime)


@dataclass(frozen=True, slots=True)
class Release:
    tag: str
    assets: tuple[Asset, ...]  # those for Linux and macOS
    pointer: str | None = None  # the URL of the file that names the build of a version

    @property
    def build(self) -> int | None:
        """llama.cpp's build number; None for a version such as v0.5.0."""
        found = _TAG.fullmatch(self.tag)
        return int(found[1]) if found else None


def is_tag(text: str) -> bool:
    """Return whether a text has the form of a build such as b11434 or a version such as v0.5.0."""
    return bool(_TAG.fullmatch(text) or _VERSION.fullmatch(text))


def read_release(found: Mapping[str, Any]) -> Release:
    """Read the API's description of one release.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: It describes no release.
    """
    if not is_tag(found["tag_name"]):
        raise ValueError(f"no release has the tag {found['tag_name']!r}")
    pointer, assets = None, []
    for asset in found["assets"]:
        name, url = str(asset["name"]), str(asset["browser_download_url"])
        digest = _SHA256.fullmatch(asset.get("digest") or "")
        assets.append(parse(name, url, int(asset["size"]), digest and digest[1]))
        pointer = url if name == _POINTER else pointer
    return Release(found["tag_name"], tuple(filter(None, assets)), pointer)


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
    """The releases at a URL.

    Args:
        client: Follows redirects.
        url: The URL of the list of releases.
        environ: `GITHUB_TOKEN` in it is sent to GitHub for a higher rate limit, but not to mirrors.
        now: The clock, to tell how long a rate limit lasts.
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

        `wanted` is a tag such as b11434 or v0.5.0, `stable` for the build of the latest version, or
        `newest`. Raises EngineMissing if no release has this tag, or DownloadFailed.
        """
        if wanted == "newest":
            return next(self._builds())
        found = self._release("latest" if wanted == "stable" else f"tags/{wanted}", wanted)
        return found if found.build else self._release(f"tags/{self._build_of(found)}", wanted)

    def _builds(self) -> Iterator[Release]:
        """Yield builds, the newest first, without those whose files are still being uploaded."""
        listed = self._get(f"{self._url}?per_page={_LISTED}", _ANSWER_MAX_BYTES)
        found = [
            self._read(release)
            for release in self._json(listed, list)
            if not (isinstance(release, Mapping) and release.get("draft"))
        ]
        yield from sorted(
            (release for release in found if release.build and release.assets),
            key=lambda release: -(release.build or 0),
        )
        raise EngineMissing(f"{self._host} lists no build of llama.cpp", hint=_MIRROR)

    def _release(self, path: str, wanted: str) -> Release:
        content = self._get(f"{self._url}/{path}", _ANSWER_MAX_BYTES, wanted)
        return self._read(self._json(content, dict))

    def _build_of(self, version: Release) -> str:
        if version.pointer is None:
            raise EngineMissing(
                f"llama.cpp {version.tag} does not say which build it is",
                hint="name a build such as b11434, or newest",
            )
        tag = self._get(version.pointer, _POINTER_MAX_BYTES).decode("ascii", "replace").strip()
        if not is_tag(tag) or tag.startswith("v"):
            raise self._strange(f"{_POINTER} of {version.tag} names no build")
        return tag

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


def _wait_s(response: httpx.Response, now: datetime) -> float | None:
    """Return how long the rate limit lasts; None if the response is no rate limit.

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
