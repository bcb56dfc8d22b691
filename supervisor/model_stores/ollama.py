"""Ollama's store: manifests that name blobs by their digest.

    manifests/registry.ollama.ai/library/qwen3/8b  a manifest: qwen3:8b
    blobs/sha256-HEX                               a GGUF, a template, parameters, …

Source: Ollama, docs (FAQ: where models are stored), types/model/name.go, server/layer.go.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.host.files import open_regular
from supervisor.model_stores.candidate import Candidate
from supervisor.model_stores.stored_model import label
from supervisor.model_stores.walk import Walk

_MEDIA: Final = "application/vnd.ollama.image."
_DIGEST: Final = re.compile(r"sha256[:-]([0-9a-f]{64})")
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_MANIFEST_MAX_BYTES: Final = 1024**2
# HOST/NAMESPACE/MODEL/TAG
_PARTS: Final = 4


@dataclass(frozen=True, slots=True)
class Layers:
    """The files of a model, and why it is not complete, or None."""

    model: Path | None
    projector: Path | None = None
    adapters: tuple[Path, ...] = ()
    problem: str | None = None


def in_store(root: Path, walk: Walk) -> Iterator[Candidate]:
    """Yield the models of a store (`root` is that of `manifests` and `blobs`)."""
    manifests = root / "manifests"
    for path in Walk(manifests, walk.limits, walk.clock, walk.notes).files():
        parts = path.relative_to(manifests).parts
        if len(parts) == _PARTS:
            found = _layers(path, root / "blobs")
            yield Candidate(
                _name(parts),
                "ollama",
                found.model or path,
                root,
                projector=found.projector,
                adapters=found.adapters,
                problem=found.problem,
                is_certain=True,
            )


def _name(parts: Sequence[str]) -> str:
    """As Ollama shows it: its own registry and library are left out."""
    host, namespace, model, tag = parts
    shown = f"{model}:{tag}"
    if host != _REGISTRY:
        return label(host, namespace, shown)
    return label(shown) if namespace == _LIBRARY else label(namespace, shown)


def _layers(manifest: Path, blobs: Path) -> Layers:
    try:
        listed = _read(manifest)
        files = {
            kind: [_blob(one, blobs) for one in listed if _kind(one) == kind] for kind in _KINDS
        }
    except _Broken as error:
        return Layers(None, problem=str(error))
    if len(files["model"]) != 1:
        count = len(files["model"])
        return Layers(None, problem="it has no GGUF" if not count else f"it has {count} GGUFs")
    projector = next(iter(files["projector"]), None)
    return Layers(files["model"][0], projector, tuple(files["adapter"]))


_KINDS: Final = ("model", "projector", "adapter")


class _Broken(Exception):
    """Why a manifest cannot be used, as a clause."""


def _read(manifest: Path) -> list[dict[str, Any]]:
    try:
        with open_regular(manifest) as file:
            found = json.loads(file.read(_MANIFEST_MAX_BYTES))
    except OSError as error:
        raise _Broken(f"its manifest cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _Broken("its manifest is damaged; ollama pull fetches it again") from error
    layers = found.get("layers") if isinstance(found, dict) else None
    if not isinstance(layers, list):
        raise _Broken("its manifest lists no layers; ollama pull fetches it again")
    return [one for one in layers if isinstance(one, dict)]


def _kind(layer: dict[str, Any]) -> str:
    return str(layer.get("mediaType")).partition(";")[0].removeprefix(_MEDIA)


def _blob(layer: dict[str, Any], blobs: Path) -> Path:
    """Return the file of a layer: whatever the manifest says, one in the directory of blobs."""
    digest = _DIGEST.fullmatch(str(layer.get("digest")))
    if not digest:
        raise _Broken("its manifest names a digest that is none")
    path = blobs / f"sha256-{digest[1]}"
    try:
        size_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise _Broken(f"its {_kind(layer)} blob {path.name[:19]}… is missing") from error
    except OSError as error:
        raise _Broken(f"its {_kind(layer)} blob cannot be read: {error.strerror}") from error
    if size_bytes != layer.get("size", size_bytes):
        raise _Broken(
            f"its {_kind(layer)} blob has {size_bytes:,} of {layer.get('size')} bytes; "
            "ollama pull fetches it again"
        )
    return path
