"""The files of the page, read once: those of this package, and the libraries that it uses.

A path of a request is only looked up in this table; none becomes the path of a file.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Final

INDEX: Final = "index.html"
_PAGE: Final = "page"
_LIST: Final = "page.toml"
_TYPES: Final = MappingProxyType(
    {
        ".css": "text/css; charset=utf-8",
        ".html": "text/html; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".mjs": "text/javascript; charset=utf-8",
        ".png": "image/png",
        ".svg": "image/svg+xml; charset=utf-8",
    }
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    content_type: str
    etag: str


def page_files() -> Mapping[str, StaticFile]:
    """The files of the page, by their paths in its folder."""
    folder = resources.files(__package__).joinpath(_PAGE)
    return {path: file for path, one in _below(folder, "") if (file := _file(path, one))}


def library_files(vendor: Path) -> Mapping[str, StaticFile]:
    """The files that `page.toml` in this folder lists, by `NAME/FILE`."""
    listed = vendor / _LIST
    if not listed.is_file():
        return {}
    libraries = tomllib.loads(listed.read_text("utf-8"))["libraries"]
    paths = [f"{one['name']}/{name}" for one in libraries for name in one["files"]]
    return {path: file for path in paths if (file := _file(path, vendor / path))}


def _below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for one in folder.iterdir():
        if one.is_dir():
            yield from _below(one, f"{prefix}{one.name}/")
        else:
            yield prefix + one.name, one


def _file(path: str, one: Traversable) -> StaticFile | None:
    """Read a file; None for one of a type that is not served."""
    if (content_type := _TYPES.get(Path(path).suffix)) is None:
        return None
    body = one.read_bytes()
    return StaticFile(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
