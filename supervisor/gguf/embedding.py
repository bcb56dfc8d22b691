"""How a model makes embeddings or ranks texts, and the batches this needs. Pure.

Source: llama.cpp, tools/server/server-context.cpp: a slot that embeds takes its text in one micro
batch, unless the pooling is `last` and the model has a KV cache (server_slot::can_split).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.gguf.metadata import Gguf

# The engine's default. Source: --help, --ubatch-size.
_SPLIT_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Embedding:
    """How a model makes embeddings."""

    pooling: str  # `none`, `mean`, `cls`, `last` or `rank`
    is_only: bool  # whether it generates no text
    can_split: bool  # whether one text may be computed in several micro batches

    def micro_batch(self, ctx: int) -> int:
        """Tokens of a micro batch that inputs of up to `ctx` tokens need."""
        return min(ctx, _SPLIT_TOKENS) if self.can_split else ctx


def embedding(gguf: Gguf, chosen: Mapping[str, FlagValue]) -> Embedding | None:
    """Embedding properties of a model under its options; None if it makes no embeddings."""
    ranks = chosen.get("rerank") is True
    if not ranks and chosen.get("embedding") is not True:
        return None
    pooling = str(chosen.get("pooling", "rank" if ranks else gguf.pooling or "none"))
    return Embedding(
        pooling=pooling,
        is_only=ranks or not gguf.is_causal or gguf.pooling is not None,
        can_split=pooling == "last" and gguf.is_causal,
    )
