"""The directories of the Hugging Face cache, which other programs read and write too.

Source: huggingface_hub's "Understand caching"; llama.cpp's common/hf-cache.cpp uses the same
directories for `-hf`:

    models--OWNER--NAME/blobs/DIGEST             a file
    models--OWNER--NAME/snapshots/COMMIT/PATH    a link to it
    models--OWNER--NAME/refs/main                the commit of a branch
    .locks/models--OWNER--NAME/DIGEST.lock       held during a download
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.hub.repository import RemoteFile, Repository

_DIGEST: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_REF: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class HubCache:
    root: Path

    def repository_dir(self, repo: str) -> Path:
        return self.root / f"models--{repo.replace('/', '--')}"

    def blob(self, repo: str, digest: str) -> Path:
        return self.repository_dir(repo) / "blobs" / digest

    def part(self, repo: str, digest: str) -> Path:
        """Where a file grows; huggingface_hub before 2.0 continues it too."""
        return self.blob(repo, digest).with_name(f"{digest}.incomplete")

    def lock(self, repo: str, digest: str) -> Path:
        return self.root / ".locks" / self.repository_dir(repo).name / f"{digest}.lock"

    def path(self, repository: Repository, file: str) -> Path:
        """Where a file is found by its name."""
        return self._snapshot(repository.repo, repository.commit) / file

    def is_here(self, repository: Repository, file: RemoteFile) -> bool:
        places = (self.blob(repository.repo, file.digest), self.path(repository, file.path))
        return any(_size(one) == file.size_bytes for one in places)

    def part_bytes(self, repository: Repository, file: RemoteFile) -> int:
        return _size(self.part(repository.repo, file.digest)) or 0

    def publish(self, repository: Repository, file: RemoteFile) -> Path:
        """Give a whole file its name, and its branch the commit; return the path."""
        path, blob = self.path(repository, file.path), self.blob(repository.repo, file.digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        if _size(path) != file.size_bytes:
            draft = path.with_name(f".{secrets.token_hex(4)}.link")
            draft.symlink_to(os.path.relpath(blob, path.parent))
            draft.replace(path)
        if not _REF.fullmatch(repository.revision):
            ref = self._ref(repository.repo, repository.revision)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(repository.commit, "utf-8")
        return path

    def local(self, repo: str, revision: str) -> Repository | None:
        """Return what is here of a repository, as of the last download; None without any."""
        commit = revision if _REF.fullmatch(revision) else self._commit(repo, revision)
        where = self._snapshot(repo, commit)
        paths = [one for one in where.rglob("*.gguf") if one.is_file()] if commit else []
        files = [
            RemoteFile(one.relative_to(where).as_posix(), one.stat().st_size, _digest(one))
            for one in paths
        ]
        if not files:
            return None
        return Repository(repo, revision, commit, {one.path: one for one in files})

    def _commit(self, repo: str, revision: str) -> str:
        try:
            text = self._ref(repo, revision).read_text("utf-8").strip()
        except (OSError, ValueError):
            return ""
        return text if _REF.fullmatch(text) else ""

    def _ref(self, repo: str, revision: str) -> Path:
        return self.repository_dir(repo) / "refs" / revision

    def _snapshot(self, repo: str, commit: str) -> Path:
        return self.repository_dir(repo) / "snapshots" / commit


def _digest(path: Path) -> str:
    """Return what a link tells; a file system without links has the file itself there."""
    name = path.resolve().name
    return name if _DIGEST.fullmatch(name) else "0" * 40


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
