"""Writes a tiny LoRA adapter for the models of tiny_gguf."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from support import tiny_gguf


def make(
    path: Path,
    *,
    seed: int = 1,
    embd: int = 64,
    layers: int = 2,
    rank: int = 4,
    alpha: float = 4.0,
) -> Path:
    """Write an adapter that changes the attention of a random model, and return its path.

    It leaves the residual stream alone, in which a constant keeps control tokens away.
    """
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    random = np.random.default_rng(seed)
    tensors = [
        (f"blk.{layer}.{name}.weight.lora_{part}", random.standard_normal(shape).astype(np.float32))
        for layer in range(layers)
        for name in ("attn_q", "attn_k")
        for part, shape in (("a", (rank, embd)), ("b", (embd, rank)))
    ]
    tiny_gguf.write(writer, tensors)
    return path
