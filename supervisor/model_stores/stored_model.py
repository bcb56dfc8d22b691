"""A model in one of the places where GGUF files are kept."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Store = Literal["corral", "models_dir", "huggingface", "llama.cpp", "lmstudio", "ollama"]

# The order in which a name is given; the second of two models gets `@STORE` behind it.
STORES: Final[tuple[Store, ...]] = (
    "corral",
    "models_dir",
    "huggingface",
    "llama.cpp",
    "lmstudio",
    "ollama",
)
_NAME_MAX: Final = 64
_DIGEST_CHARACTERS: Final = 8
_LABEL_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model that was found.

    Attributes:
        name: What users call it, such as `qwen3:8b`, or `ORG/REPO:QUANT`.
        path: The GGUF file, of a split model its first shard.
        root: The directory of its store.
        files: All its shards.
        size_bytes: On the disk, all shards together, without the projector.
        kind: `chat`, `embedding` or `rerank`; empty with a problem.
        quantisation: Such as `Q4_K_M`; empty with a problem.
        projector: Its picture or sound encoder, or None.
        adapters: LoRA files that are part of it.
        problem: Why it cannot be served, or None.
    """

    name: str
    store: Store
    path: Path
    root: Path
    size_bytes: int = 0
    kind: str = ""
    quantisation: str = ""
    projector: Path | None = None
    adapters: tuple[Path, ...] = ()
    files: tuple[Path, ...] = ()
    problem: str | None = None

    @property
    def id(self) -> str:
        return model_id(self.name)

    @property
    def flags(self) -> dict[str, str]:
        """The flags for the files that belong to it."""
        found = {"mmproj": str(self.projector)} if self.projector else {}
        return found | ({"lora": ",".join(map(str, self.adapters))} if self.adapters else {})


def model_id(name: str) -> str:
    """Return a name as `[models.NAME]` may have it: without `/`, and 64 characters at most."""
    written = re.sub(r"[^A-Za-z0-9._:@+-]+", "-", name.replace("/", "--")).lstrip("._:@+-")
    if written and len(written) <= _NAME_MAX:
        return written
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    kept = written[: _NAME_MAX - len(digest) - 1] or "model"
    return f"{kept}-{digest}"


def label(*parts: str) -> str:
    """Join names that come from files and directories to one that clients can send."""
    cleaned = (re.sub(r"[^A-Za-z0-9._:@+-]+", "-", part).lstrip("._:@+-") for part in parts)
    return "/".join(part for part in cleaned if part)[:_LABEL_MAX] or "model"
