"""What a model can do, in Ollama's words. Pure.

Source: Ollama, types/model/capability.go, and server/images.go, which reads templates likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supervisor.gguf.metadata import Gguf

_VECTORS: Final = ("embedding", "embeddings", "rerank", "reranking")
_GENERATES: Final = frozenset({None, "none"})


def makes_vectors(found: Gguf, flags: Mapping[str, object]) -> bool:
    """Return whether a model with these flags of its own embeds or ranks texts."""
    pooling = flags.get("pooling", found.pooling)
    is_asked = any(flags.get(name) for name in _VECTORS) or pooling not in _GENERATES
    return is_asked or not found.is_causal


def capabilities(
    found: Gguf, flags: Mapping[str, object], chat_template: str, *, reads_images: bool
) -> tuple[str, ...]:
    if makes_vectors(found, flags):
        return ("embedding",)
    able = {
        "completion": True,
        "tools": "tools" in chat_template,
        "thinking": "enable_thinking" in chat_template or "<think>" in chat_template,
        "vision": reads_images,
    }
    return tuple(name for name, is_able in able.items() if is_able)
