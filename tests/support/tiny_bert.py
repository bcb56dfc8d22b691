"""Writes a tiny BERT: a model that sees a text as a whole, makes vectors, and generates nothing."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Final, Literal

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf

Array = NDArray[Any]

_CONTROL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_EMBD: Final = 64
_FF: Final = 128
_LAYERS: Final = 2


def make(path: Path, pooling: Literal["mean", "cls", "rank"], *, ctx: int = 512) -> Path:
    """Write a GGUF of architecture `bert` and return its path; with `rank` it ranks texts."""
    tokens = [
        *_CONTROL,
        *(f"▁{letter}" for letter in string.ascii_lowercase),
        *string.ascii_lowercase,
    ]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(ctx)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FF)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(value=False)
    writer.add_pooling_type(gguf.PoolingType[pooling.upper()])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in _CONTROL else normal for token in tokens])
    writer.add_token_type_count(2)
    for name, number in (("unknown", 1), ("seperator", 3), ("cls", 2), ("bos", 2), ("eos", 3)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    tiny_gguf.write(writer, _tensors(len(tokens), ctx, has_head=pooling == "rank").items())
    return path


def _tensors(tokens: int, ctx: int, *, has_head: bool) -> dict[str, Array]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        weights: Array = random.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)
        return weights.astype(np.float16)

    def bias(size: int) -> Array:
        return (random.standard_normal(size) * 0.1).astype(np.float32)

    one = np.ones(_EMBD, np.float32)
    found: dict[str, Array] = {
        "token_embd.weight": matrix(tokens, _EMBD) * np.float16(8),
        "position_embd.weight": matrix(ctx, _EMBD).astype(np.float32),
        "token_types.weight": matrix(2, _EMBD).astype(np.float32),
        "token_embd_norm.weight": one,
        "token_embd_norm.bias": bias(_EMBD),
    }
    sizes = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (_EMBD, _EMBD))
    sizes |= {"ffn_up": (_FF, _EMBD), "ffn_down": (_EMBD, _FF)}
    matrices = {f"blk.{n}.{name}": size for n in range(_LAYERS) for name, size in sizes.items()}
    if has_head:
        matrices |= {"cls": (_EMBD, _EMBD), "cls.output": (1, _EMBD)}
    for name, (rows, columns) in matrices.items():
        found |= {f"{name}.weight": matrix(rows, columns), f"{name}.bias": bias(rows)}
    for layer in range(_LAYERS):
        for name in ("attn_output_norm", "layer_output_norm"):
            norm = {"weight": one, "bias": bias(_EMBD)}
            found |= {f"blk.{layer}.{name}.{part}": value for part, value in norm.items()}
    return found
