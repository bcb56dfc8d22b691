"""Writes models of the shape of an 8B model, whose weights say nothing: only its speed counts.

The layers of `make` are those of Llama 3.1 8B in Q4_0; all share one set of random weights, so
that writing takes as long as the disk. The vocabulary has 32 000 tokens. The model of `make_light`
has the KV cache of Llama 3.1 8B, 128 KiB for a token in f16, and next to no weights; that of
`make_light_hybrid` the cache and recurrent states of Qwen 3.5 9B, 32 KiB for a token and 50 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf, tiny_hybrid
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


_LIGHT_EMBD: Final = 64
_LIGHT_HEAD: Final = EMBD // HEADS


def make_light(path: Path, *, ctx: int = 131_072) -> Path:
    """Write a model of 17 MB with the KV cache of an 8B model, and return its path.

    It has one query head for each KV head, so that attention costs a quarter of the real one.
    """
    tokens, types = vocabulary(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("cache of an 8B")
    writer.add_context_length(ctx)
    writer.add_embedding_length(_LIGHT_EMBD)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(_LIGHT_EMBD)
    writer.add_head_count(KV_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(_LIGHT_HEAD)
    writer.add_value_length(_LIGHT_HEAD)
    writer.add_rope_dimension_count(_LIGHT_HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_tokenizer(writer, tokens, types, CHAT_TEMPLATE)
    tiny_gguf.write(writer, _light_tensors(tokens, types))
    return path


def make_light_hybrid(path: Path, *, ctx: int = 131_072) -> Path:
    """Write a model of 110 MB with the cache and states of Qwen 3.5 9B, and return its path."""
    qwen = tiny_hybrid.Geometry(
        layers=32,
        interval=4,
        heads=16,
        kv_heads=4,
        head=256,
        state=128,
        key_heads=16,
        value_heads=32,
    )
    return tiny_hybrid.make(path, ctx=ctx, geometry=qwen)


def _light_tensors(tokens: list[str], types: list[int]) -> Iterator[tuple[str, NDArray[Any]]]:
    rng = np.random.default_rng(0)
    embedding, output = tiny_gguf.ends("random", tokens, types, _LIGHT_EMBD, rng)
    norm = np.ones(_LIGHT_EMBD, np.float32)
    yield "token_embd.weight", embedding
    yield "output.weight", output
    yield "output_norm.weight", norm
    width = KV_HEADS * _LIGHT_HEAD
    into = {"attn_q": width, "attn_k": width, "attn_v": width}
    into |= {"ffn_gate": _LIGHT_EMBD, "ffn_up": _LIGHT_EMBD}
    onto = {"attn_output": width, "ffn_down": _LIGHT_EMBD}
    for layer in range(LAYERS):
        for name, rows in into.items():
            weights = rng.standard_normal((rows, _LIGHT_EMBD)) / np.sqrt(_LIGHT_EMBD)
            yield f"blk.{layer}.{name}.weight", weights.astype(np.float16)
        for name, columns in onto.items():
            weights = rng.standard_normal((_LIGHT_EMBD, columns)) / np.sqrt(columns)
            weights[0] = 0  # the constant of `tiny_gguf`
            yield f"blk.{layer}.{name}.weight", weights.astype(np.float16)
        for name in ("attn_norm", "ffn_norm"):
            yield f"blk.{layer}.{name}.weight", norm


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
