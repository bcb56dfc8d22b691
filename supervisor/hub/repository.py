"""The files of a repository at one commit. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from supervisor.errors import DownloadFailed
from supervisor.hub import file_names
from supervisor.hub.file_names import FileGroup, FileName

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file; its digest is a SHA-256, or the SHA-1 of a git blob where it is not in LFS."""

    path: str
    size_bytes: int
    digest: str

    def __post_init__(self) -> None:
        parts = PurePosixPath(self.path).parts
        is_inside = not self.path.startswith("/") and ".." not in parts and parts
        if not is_inside or "\\" in self.path or not self.path.isprintable():
            raise DownloadFailed(f"the hub lists a file with the invalid path {self.path!r}")
        if not (_SHA256.fullmatch(self.digest) or _COMMIT.fullmatch(self.digest)):
            raise DownloadFailed(f"the hub gives no digest of {self.path}")


@dataclass(frozen=True, slots=True)
class Repository:
    """The GGUF files of a repository at one commit."""

    repo: str
    revision: str
    commit: str
    files: Mapping[str, RemoteFile]  # by path

    def __post_init__(self) -> None:
        if not _COMMIT.fullmatch(self.commit):
            raise DownloadFailed(f"the hub gives no commit of {self.repo}")

    @property
    def groups(self) -> tuple[FileGroup, ...]:
        return file_names.group(self.files)

    def file(self, name: FileName) -> RemoteFile:
        return self.files[name.path]

    def size_bytes(self, group: FileGroup) -> int:
        return sum(self.file(one).size_bytes for one in group.files)


@dataclass(frozen=True, slots=True)
class FoundRepository:
    """A repository that a search found."""

    repo: str
    downloads: int  # in the last 30 days
    likes: int
    parameters: int | None  # number of weights, if the hub tells it
    date: str  # of the last change, as in 2026-10-31; empty if unknown
    is_gated: bool  # its owner wants conditions to be accepted
