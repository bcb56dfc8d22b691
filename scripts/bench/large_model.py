"""Writes a model of the shape of an 8B model, whose weights say nothing: only its speed counts.

The layers are those of Llama 3.1 8B in Q4_0; all share one set of random weights, so that writing
takes as long as the disk. The vocabulary has 32 000 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from support.tiny_gguf import CHAT_TEMPLATE, add_tokenizer, vocabulary

EMBD, LAYERS, HEADS, KV_HEADS, FF = 4096, 32, 32, 8, 14336
VOCABULARY: Final = 32_000
CTX: Final = 8192
# Q4_0: 32 weights in an f16 scale and 16 bytes. Source: ggml-common.h of llama.cpp, block_q4_0.
_BLOCK_WEIGHTS, _SCALE_BYTES, _BLOCK_BYTES = 32, 2, 18
_Bytes = NDArray[np.uint8]


def make(path: Path, *, layers: int = LAYERS) -> Path:
    """Write the model, 4 GiB, and return its path."""
    known, _ = vocabulary(0)
    tokens, types = vocabulary(VOCABULARY - len(known))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random 8B")
    writer.add_context_length(CTX)
    writer.add_embedding_length(EMBD)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(EMBD // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    add_tokenizer(writer, tokens, types, CHAT_TEMPLATE)
    _add_tensors(writer, layers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tensors(writer: Any, layers: int) -> None:
    rng = np.random.default_rng(0)
    kv = EMBD // HEADS * KV_HEADS
    shapes = {
        "attn_q": (EMBD, EMBD),
        "attn_k": (kv, EMBD),
        "attn_v": (kv, EMBD),
        "attn_output": (EMBD, EMBD),
        "ffn_gate": (FF, EMBD),
        "ffn_up": (FF, EMBD),
        "ffn_down": (EMBD, FF),
    }
    weights = {name: _quantized(rng, *shape) for name, shape in shapes.items()}
    norm = np.ones(EMBD, dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    outer = _quantized(rng, VOCABULARY, EMBD)
    writer.add_tensor("token_embd.weight", outer, raw_dtype=kind)
    writer.add_tensor("output.weight", outer, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", norm)
    for layer in range(layers):
        for name, weight in weights.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", weight, raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)


def _quantized(rng: np.random.Generator, rows: int, columns: int) -> _Bytes:
    """Return random weights of about the size that keeps sums of a row near 1."""
    blocks = rng.integers(0, 256, (rows, columns // _BLOCK_WEIGHTS, _BLOCK_BYTES), dtype=np.uint8)
    scale = np.float16(0.2 / np.sqrt(columns))
    blocks[:, :, :_SCALE_BYTES] = np.frombuffer(scale.tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)
