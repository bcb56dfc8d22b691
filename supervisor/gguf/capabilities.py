"""What a model can do, in Ollama's words. Pure.

Source: Ollama, types/model/capability.go, and server/images.go, which reads templates likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from supervisor.gguf.metadata import Gguf

_VECTORS: Final = ("embedding", "embeddings", "rerank", "reranking")
_GENERATES: Final = frozenset({None, "none"})


def capabilities(found: Gguf, flags: Mapping[str, object], chat_template: str) -> tuple[str, ...]:
    """Return those of a model with these flags of its own."""
    pooling = flags.get("pooling", found.pooling)
    makes_vectors = any(flags.get(name) for name in _VECTORS) or pooling not in _GENERATES
    if makes_vectors or not found.is_causal:
        return ("embedding",)
    able = {
        "completion": True,
        "tools": "tools" in chat_template,
        "thinking": "enable_thinking" in chat_template or "<think>" in chat_template,
        "vision": "mmproj" in flags,
    }
    return tuple(name for name, is_able in able.items() if is_able)
