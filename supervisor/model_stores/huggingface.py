"""The Hugging Face cache, which newer builds of llama.cpp use too.

    models--ORG--REPO/refs/main           the name of a revision
    models--ORG--REPO/snapshots/REV/FILE  a link to blobs/DIGEST
    models--ORG--REPO/blobs/DIGEST.incomplete

Source: huggingface_hub's documentation, "Manage huggingface_hub cache-system"; llama.cpp,
common/hf-cache.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from supervisor.host.files import open_regular
from supervisor.model_stores.candidate import Candidate
from supervisor.model_stores.folder import of_files, repository_name
from supervisor.model_stores.stored_model import Store
from supervisor.model_stores.walk import Walk

_REPOSITORY: Final = re.compile(r"models--([^-].*?)--(.+)")
_REVISION: Final = re.compile(r"[0-9A-Za-z._-]{1,64}")
_REPOSITORIES_MAX: Final = 2000
_REF_MAX_BYTES: Final = 256


def in_cache(root: Path, store: Store, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of all repositories of a cache, each by its newest revision."""
    for directory in repositories(root, walk):
        found = _REPOSITORY.fullmatch(directory.name)
        if found and (snapshot := _snapshot(directory)):
            inner = Walk(snapshot, walk.limits, walk.clock, walk.notes)
            name_of = partial(repository_name, found[1], found[2])
            for candidate in of_files(snapshot, inner.files(), store, name_of):
                yield replace(candidate, root=root)


def repositories(root: Path, walk: Walk) -> list[Path]:
    """Return the directories of models in a cache; those that cannot be listed are noted."""
    try:
        found = sorted(path for path in root.iterdir() if path.name.startswith("models--"))
    except FileNotFoundError:
        return []
    except OSError as error:
        walk.notes.append(f"{root} cannot be read: {error.strerror}")
        return []
    if len(found) > _REPOSITORIES_MAX:
        walk.notes.append(f"{root}: the search ended after {_REPOSITORIES_MAX:,} repositories")
    return found[:_REPOSITORIES_MAX]


def _snapshot(directory: Path) -> Path | None:
    """Return the snapshot of the branch `main`, or else the one that was written last."""
    named = directory / "snapshots" / (_main(directory) or "-")
    if named.is_dir():
        return named
    try:
        found = [(path.stat().st_mtime, path) for path in (directory / "snapshots").iterdir()]
    except OSError:
        return None
    return max(found)[1] if found else None


def _main(directory: Path) -> str | None:
    try:
        with open_regular(directory / "refs" / "main") as file:
            text = file.read(_REF_MAX_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return text if _REVISION.fullmatch(text) and text.strip(".") else None
