"""Lays out the places where other programs keep GGUF files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REVISION: Final = "a" * 40
_IMAGE: Final = "application/vnd.ollama.image."


@dataclass(frozen=True, slots=True)
class Ollama:
    """Ollama's store: manifests and blobs."""

    root: Path

    def blob(self, content: bytes) -> str:
        """Store a blob, and return its digest."""
        digest = hashlib.sha256(content).hexdigest()
        path = self.root / "blobs" / f"sha256-{digest}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return f"sha256:{digest}"

    def manifest(self, name: str, layers: Sequence[tuple[str, str, int]]) -> Path:
        """Write a manifest of layers (kind, digest, size); `name` is HOST/NAMESPACE/MODEL/TAG."""
        path = self.root / "manifests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        listed = [
            {"mediaType": _IMAGE + kind, "digest": digest, "size": size}
            for kind, digest, size in layers
        ]
        manifest = "application/vnd.docker.distribution.manifest.v2+json"
        path.write_text(
            json.dumps({"schemaVersion": 2, "mediaType": manifest, "config": {}, "layers": listed})
        )
        return path

    def model(self, name: str, **files: Path) -> Path:
        """Store a model whose layers have the content of files, by their kind."""
        layers = [
            (kind, self.blob(path.read_bytes()), path.stat().st_size)
            for kind, path in files.items()
        ]
        params = b'{"stop": ["<|im_end|>"]}'
        layers.append(("params", self.blob(params), len(params)))
        return self.manifest(name, layers)


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """The Hugging Face cache."""

    root: Path

    def repository(self, repo: str) -> Path:
        return self.root / f"models--{repo.replace('/', '--')}"

    def add(self, repo: str, name: str, content: bytes, revision: str = REVISION) -> Path:
        """Store a file of a repository, and return its link."""
        directory = self.repository(repo)
        blob = directory / "blobs" / hashlib.sha256(content).hexdigest()
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        return self.link(repo, name, blob.name, revision)

    def link(self, repo: str, name: str, blob: str, revision: str = REVISION) -> Path:
        directory = self.repository(repo)
        link = directory / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(*[".."] * (len(Path(name).parts) + 1), "blobs", blob))
        main = directory / "refs" / "main"
        if not main.exists():
            main.parent.mkdir()
            main.write_text(revision)
        return link


def copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(source.read_bytes())
    return target
