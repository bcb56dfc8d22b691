"""page.toml pins the libraries of the page; the page refers to nothing else."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path, PurePosixPath
from posixpath import normpath

from proxy.dashboard.dashboard import library_files, page_files

VENDOR = Path(__file__).parents[3] / "vendor"
REFERENCES = re.compile(r'(?:from |import\(?|src=|href=)"(\.{1,2}/[^"]+|(?:page|vendor)/[^"]+)"')


def test_the_files_are_those_that_were_pinned() -> None:
    libraries = tomllib.loads((VENDOR / "page.toml").read_text("utf-8"))["libraries"]
    for library in libraries:
        folder = VENDOR / library["name"]
        assert {path.name for path in folder.iterdir()} == set(library["files"])
        for name, digest in library["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name


def test_all_that_the_page_refers_to_is_served() -> None:
    served = {f"page/{path}": page_file for path, page_file in page_files().items()}
    known = {*served, *(f"vendor/{path}" for path in library_files(VENDOR))}
    missing = [
        f"{path}: {found}"
        for path, (body, _, _) in served.items()
        for found in REFERENCES.findall(body.decode())
        if target(path, found) not in known
    ]
    assert missing == []


def target(path: str, reference: str) -> str:
    """Resolve a reference of a file; those of elements are relative to /corral/."""
    if not reference.startswith("."):
        return reference
    return normpath(PurePosixPath(path).parent / reference)
