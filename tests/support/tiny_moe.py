"""Writes models with experts whose weights are zeros, which take no room on the disk.

Source of their keys and tensors: llama.cpp, src/models/ of qwen3moe, openai-moe, glm4-moe and
deepseek2.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import gguf
import numpy as np
from support import tiny_gguf

Kind = Literal["qwen3moe", "gpt-oss", "glm4moe", "deepseek2"]
KINDS: Final[tuple[Kind, ...]] = ("qwen3moe", "gpt-oss", "glm4moe", "deepseek2")
# The feed-forward part of their first layer has no experts; the others have a shared expert.
_LEADS_DENSE: Final = frozenset({"glm4moe", "deepseek2"})
_ROPE: Final = 32  # values of a head with positions, of deepseek2
_RANK: Final = 64  # of the keys and values of deepseek2


@dataclass(frozen=True)
class Size:
    embd: int = 512
    layers: int = 8
    heads: int = 8
    head: int = 64
    kv_heads: int = 2
    experts: int = 32
    used: int = 4
    ff: int = 512  # of one expert, and a quarter of a layer without experts
    ctx: int = 8192


def make(path: Path, kind: Kind, size: Size) -> Path:
    """Write a GGUF whose weights are 0, the experts' of type Q8_0, and return its path."""
    tokens, types = tiny_gguf.vocabulary(0)
    writer = gguf.GGUFWriter(path, kind)
    _describe(writer, kind, size)
    tiny_gguf.add_tokenizer(writer, tokens, types, tiny_gguf.CHAT_TEMPLATE)
    weights_bytes = 0
    for name, shape in _shapes(kind, size, len(tokens)):
        kind_of = _type(name, shape)
        values, block_bytes = gguf.GGML_QUANT_SIZES[kind_of]
        size_bytes = math.prod(shape) // values * block_bytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size_bytes, raw_dtype=kind_of)
        weights_bytes += _aligned(size_bytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, _aligned(path.stat().st_size) + weights_bytes)
    return path


def _aligned(size_bytes: int) -> int:
    alignment: int = gguf.GGUF_DEFAULT_ALIGNMENT
    return -(-size_bytes // alignment) * alignment


def _type(name: str, shape: Sequence[int]) -> gguf.GGMLQuantizationType:
    if len(shape) == 1 or name.endswith(("gate_inp.weight", ".bias")):
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType.Q8_0 if "_exps." in name else gguf.GGMLQuantizationType.F16


def _describe(writer: gguf.GGUFWriter, kind: Kind, size: Size) -> None:
    writer.add_name(f"tiny {kind}")
    writer.add_context_length(size.ctx)
    writer.add_embedding_length(size.embd)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(4 * size.ff)
    writer.add_head_count(size.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_expert_count(size.experts)
    writer.add_expert_used_count(size.used)
    writer.add_expert_feed_forward_length(size.ff)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    if kind == "deepseek2":
        writer.add_head_count_kv(1)
        writer.add_key_length(_RANK + _ROPE)
        writer.add_value_length(_RANK)
        writer.add_key_length_mla(size.head + _ROPE)
        writer.add_value_length_mla(size.head)
        writer.add_kv_lora_rank(_RANK)
        writer.add_q_lora_rank(_RANK)
        writer.add_rope_dimension_count(_ROPE)
    else:
        writer.add_head_count_kv(size.kv_heads)
        writer.add_key_length(size.head)
        writer.add_value_length(size.head)
        writer.add_rope_dimension_count(size.head)
    if kind in _LEADS_DENSE:
        writer.add_leading_dense_block_count(1)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_weights_norm(value=True)
    if kind == "gpt-oss":
        writer.add_sliding_window(128)


Tensors = Iterator[tuple[str, tuple[int, ...]]]


def _shapes(kind: Kind, size: Size, vocab_size: int) -> Tensors:
    """Yield names and shapes, the longest stride first."""
    yield "token_embd.weight", (vocab_size, size.embd)
    yield "output.weight", (vocab_size, size.embd)
    yield "output_norm.weight", (size.embd,)
    for layer in range(size.layers):
        attention = _mla(size) if kind == "deepseek2" else _attention(kind, size)
        for name, shape in (*attention, *_feed_forward(kind, size, layer)):
            yield f"blk.{layer}.{name}", shape


def _attention(kind: Kind, size: Size) -> Tensors:
    queries, kept = size.heads * size.head, size.kv_heads * size.head
    yield "attn_norm.weight", (size.embd,)
    yield "attn_q.weight", (queries, size.embd)
    yield "attn_k.weight", (kept, size.embd)
    yield "attn_v.weight", (kept, size.embd)
    yield "attn_output.weight", (size.embd, queries)
    if kind == "qwen3moe":
        yield "attn_q_norm.weight", (size.head,)
        yield "attn_k_norm.weight", (size.head,)
        return
    yield "attn_q.bias", (queries,)
    yield "attn_k.bias", (kept,)
    yield "attn_v.bias", (kept,)
    if kind == "gpt-oss":
        yield "attn_output.bias", (size.embd,)
        yield "attn_sinks.weight", (size.heads,)


def _mla(size: Size) -> Tensors:
    yield "attn_norm.weight", (size.embd,)
    yield "attn_q_a_norm.weight", (_RANK,)
    yield "attn_kv_a_norm.weight", (_RANK,)
    yield "attn_q_a.weight", (_RANK, size.embd)
    yield "attn_q_b.weight", (size.heads * (size.head + _ROPE), _RANK)
    yield "attn_kv_a_mqa.weight", (_RANK + _ROPE, size.embd)
    yield "attn_k_b.weight", (size.heads, _RANK, size.head)
    yield "attn_v_b.weight", (size.heads, size.head, _RANK)
    yield "attn_output.weight", (size.embd, size.heads * size.head)


def _feed_forward(kind: Kind, size: Size, layer: int) -> Tensors:
    yield (
        ("post_attention_norm" if kind in {"gpt-oss", "glm4moe"} else "ffn_norm") + ".weight",
        (size.embd,),
    )
    if kind in _LEADS_DENSE and layer == 0:
        yield from _matrices("", size.embd, 4 * size.ff)
        return
    yield "ffn_gate_inp.weight", (size.experts, size.embd)
    for name, shape in _matrices("_exps", size.embd, size.ff):
        yield name, (size.experts, *shape)
    if kind in _LEADS_DENSE:
        yield from _matrices("_shexp", size.embd, size.ff)
    if kind == "glm4moe":
        yield "exp_probs_b.bias", (size.experts,)
    if kind == "gpt-oss":
        yield "ffn_gate_inp.bias", (size.experts,)
        yield "ffn_gate_exps.bias", (size.experts, size.ff)
        yield "ffn_up_exps.bias", (size.experts, size.ff)
        yield "ffn_down_exps.bias", (size.experts, size.embd)


def _matrices(of: str, embd: int, ff: int) -> Tensors:
    yield f"ffn_gate{of}.weight", (ff, embd)
    yield f"ffn_up{of}.weight", (ff, embd)
    yield f"ffn_down{of}.weight", (embd, ff)
