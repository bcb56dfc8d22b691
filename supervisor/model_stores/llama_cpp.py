"""The cache of older builds of llama.cpp: files in one directory, with manifests beside them.

`-hf USER/REPO:TAG` wrote USER_REPO_FILE.gguf and `manifest=USER=REPO=TAG.json`, with the names of
the files in the repository. Newer builds use the Hugging Face cache, or LLAMA_CACHE like one.

Source: llama.cpp, common/download.cpp before and common/hf-cache.cpp after March 2026.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from supervisor.host.files import open_regular
from supervisor.model_stores.candidate import Candidate
from supervisor.model_stores.folder import in_folder
from supervisor.model_stores.stored_model import label
from supervisor.model_stores.walk import Walk

_MANIFEST: Final = "manifest="
_MANIFEST_MAX_BYTES: Final = 1024**2
_MANIFEST_PARTS: Final = 3
_STORE: Final = "llama.cpp"


def in_flat_cache(root: Path, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of a cache, by USER/REPO:TAG where a manifest says so."""
    found = list(in_folder(root, _STORE, walk))
    manifests = dict(_manifests(root))
    for candidate in found:
        if known := manifests.get(candidate.path.name):
            name, projector = known
            beside = root / projector if projector else None
            exists = beside is not None and beside.is_file()
            yield replace(candidate, name=name, projector=beside if exists else None)
        else:
            yield candidate


def _manifests(root: Path) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """Yield the file of a model with its name and the file of its projector."""
    try:
        paths = sorted(path for path in root.iterdir() if path.name.startswith(_MANIFEST))
    except OSError:
        return
    for path in paths:
        parts = path.name.removeprefix(_MANIFEST).removesuffix(".json").split("=")
        if len(parts) != _MANIFEST_PARTS:
            continue
        user, repository, tag = parts
        content = _read(path)
        if model := _file_name(content, "ggufFile"):
            prefix = f"{user}_{repository}_"
            projector = _file_name(content, "mmprojFile")
            name = label(user, f"{repository}:{tag}")
            yield prefix + model, (name, projector and prefix + projector)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            found = json.loads(file.read(_MANIFEST_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _file_name(content: dict[str, Any], key: str) -> str | None:
    found = content.get(key)
    name = found.get("rfilename") if isinstance(found, dict) else None
    return name.replace("/", "_") if isinstance(name, str) and "\0" not in name else None
