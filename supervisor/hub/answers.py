"""What the hub's API answers, by huggingface_hub's types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from supervisor.errors import CorralError, DownloadFailed
from supervisor.hub.repository import FoundRepository, RemoteFile, Repository
from supervisor.hub.session import ModelInfo, RepoSibling


def repository(body: bytes, repo: str, revision: str) -> Repository:
    """Return the GGUF files of a repository; raises DownloadFailed."""
    with _readable(repo):
        info = ModelInfo(**json.loads(body))
        files = [
            RemoteFile(one.rfilename, one.size or 0, _digest(one))
            for one in info.siblings or ()
            if one.rfilename.lower().endswith(".gguf")
        ]
        return Repository(repo, revision, info.sha or "", {one.path: one for one in files})


def found(body: bytes, words: str) -> tuple[FoundRepository, ...]:
    """Return what a search found; raises DownloadFailed."""
    with _readable(f"a search for {words}"):
        return tuple(_found(ModelInfo(**one)) for one in json.loads(body))


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
