"""A release of llama.cpp, as GitHub's API describes it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from supervisor.releases.asset_name import AssetName, parse

_TAG: Final = re.compile(r"b(\d{1,9})")
_VERSION: Final = re.compile(r"v\d{1,4}(\.\d{1,6}){1,3}")
_SHA256: Final = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Asset:
    """A file of a release.

    Attributes:
        parsed: What its name says; None for files that are no builds for Linux or macOS.
        sha256: In hex; None where the API does not say it, as for releases before June 2025.
    """

    name: str
    url: str
    size_bytes: int
    sha256: str | None
    parsed: AssetName | None


@dataclass(frozen=True, slots=True)
class Release:
    tag: str
    assets: tuple[Asset, ...]

    @property
    def build(self) -> int | None:
        """llama.cpp's build number; None for a version such as v0.5.0."""
        found = _TAG.fullmatch(self.tag)
        return int(found[1]) if found else None


def is_tag(text: str) -> bool:
    """Return whether a text may name a release: a build such as b11434, or a version."""
    return bool(_TAG.fullmatch(text) or _VERSION.fullmatch(text))


def read_release(found: Mapping[str, Any]) -> Release:
    """Read the API's description of one release.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: It is none.
    """
    if not is_tag(found["tag_name"]):
        raise ValueError(f"no release has the tag {found['tag_name']!r}")
    return Release(found["tag_name"], tuple(_asset(one) for one in found["assets"]))


def _asset(found: Mapping[str, Any]) -> Asset:
    digest = _SHA256.fullmatch(found.get("digest") or "")
    return Asset(
        name=str(found["name"]),
        url=str(found["browser_download_url"]),
        size_bytes=int(found["size"]),
        sha256=digest[1] if digest else None,
        parsed=parse(str(found["name"])),
    )
