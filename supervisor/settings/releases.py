"""`[releases]`: where llama.cpp's releases are fetched from."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import SettingsTable, text

GITHUB: Final = "https://api.github.com/repos/ggml-org/llama.cpp/releases"


def _url(value: str) -> str:
    parts = urlsplit(text(value))
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("not an address such as https://example.com/releases")
    return value.rstrip("/")


Url = Annotated[str, AfterValidator(_url)]


class ReleaseSettings(SettingsTable):
    """`[releases]`: a mirror of llama.cpp's releases."""

    api: Url = Field(GITHUB, description="GitHub's list of releases, or a mirror of it")
    downloads: Url | None = Field(
        None,
        description="a mirror of the files: URL/TAG/NAME; unset: where the list says they are. "
        "They must have the SHA-256 that the list says",
    )
