"""Writes a tiny hybrid model: a layer with a recurrent state, one with a KV cache.

It can have a layer that drafts the next token but one (multi-token prediction, MTP). Others have
the architecture of LFM2 or Jamba, or of Mamba: two layers with a recurrent state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf

Array = NDArray[Any]

_ARCHITECTURE: Final = "qwen35"
_EMBD: Final = 64
_FF: Final = 128
_HEADS: Final = 2
_HEAD: Final = 32
_STATE: Final = 16
_CONV: Final = 4
_RANK: Final = 4
_LAYERS: Final = 2


@dataclass(frozen=True)
class Geometry:
    """The shape of a Qwen 3.5, apart from its widths.

    Attributes:
        layers: Every `interval`-th has a KV cache, the others a recurrent state.
        heads: Of a layer with a KV cache, whose keys and values have `kv_heads` of `head` numbers.
        state: Numbers in a row of the state of each of `value_heads`; it has as many rows.
    """

    layers: int = _LAYERS
    interval: int = 2
    heads: int = _HEADS
    kv_heads: int = _HEADS
    head: int = _HEAD
    state: int = _STATE
    key_heads: int = _HEADS
    value_heads: int = _HEADS

    @property
    def inner(self) -> int:
        return self.value_heads * self.state


_TINY: Final = Geometry()


def make(
    path: Path,
    *,
    mode: tiny_gguf.Mode = "random",
    ctx: int = 2048,
    drafts: bool = False,
    chat_template: str = tiny_gguf.CHAT_TEMPLATE,
    geometry: Geometry = _TINY,
) -> Path:
    """Write a GGUF and return its path.

    Args:
        path: Where to write.
        mode: The text that the model generates, as of `tiny_gguf.make`.
        ctx: Context length the model claims to be trained for, in tokens.
        drafts: Whether it has a layer that drafts; with mode `cycle` its drafts are right.
        chat_template: The template to store.
        geometry: Its layers, heads and states.
    """
    return _write(path, mode, ctx, geometry, drafts=drafts, chat_template=chat_template)


def make_other(
    path: Path,
    architecture: Literal["lfm2", "jamba", "mamba"],
    *,
    mode: tiny_gguf.Mode = "random",
    chat_template: str = tiny_gguf.CHAT_TEMPLATE,
) -> Path:
    """Write a model of another architecture and return its path."""
    tokens, types = tiny_gguf.vocabulary(0)
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny {architecture} {mode}")
    writer.add_context_length(2048)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_FF)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    if architecture == "lfm2":
        writer.add_rope_dimension_count(_HEAD)
        writer.add_rope_freq_base(1e6)
        writer.add_shortconv_l_cache(_CONV - 1)
    else:
        writer.add_ssm_conv_kernel(_CONV)
        writer.add_ssm_inner_size(2 * _EMBD)
        writer.add_ssm_state_size(_STATE)
        writer.add_ssm_time_step_rank(_RANK)
    if architecture == "mamba":
        writer.add_head_count(0)
    else:  # no head: the layer is recurrent
        writer.add_head_count(_HEADS)
        writer.add_head_count_kv([0, _HEADS])
    tiny_gguf.add_tokenizer(writer, tokens, types, chat_template)
    embedding, output = tiny_gguf.ends(mode, tokens, types, _EMBD, random)
    norm = np.ones(_EMBD, np.float32)
    found = {"token_embd.weight": embedding, "output.weight": output}
    found["token_embd_norm.weight" if architecture == "lfm2" else "output_norm.weight"] = norm
    for layer, block in enumerate(_other_blocks(architecture, mode, random)):
        block["attn_norm.weight"] = norm
        found |= {f"blk.{layer}.{name}": weights for name, weights in block.items()}
    tiny_gguf.write(writer, found.items())
    return path


def _weights(
    mode: tiny_gguf.Mode, random: np.random.Generator
) -> tuple[Callable[[int, int], Array], Callable[[int], Array]]:
    """Return a function that makes a matrix, and one for a matrix that writes to the stream."""

    def matrix(rows: int, columns: int) -> Array:
        weights: Array = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return weights.astype(np.float16)

    def onto_stream(columns: int) -> Array:
        weights = matrix(_EMBD, columns) * np.float16(mode == "random")
        weights[0] = 0
        return weights

    return matrix, onto_stream


def _other_blocks(
    architecture: str, mode: tiny_gguf.Mode, random: np.random.Generator
) -> list[dict[str, Array]]:
    inner = 2 * _EMBD

    matrix, onto_stream = _weights(mode, random)

    def mamba() -> dict[str, Array]:
        return {
            "ssm_in.weight": matrix(2 * inner, _EMBD),
            "ssm_conv1d.weight": matrix(inner, _CONV).astype(np.float32),
            "ssm_conv1d.bias": np.zeros(inner, np.float32),
            "ssm_x.weight": matrix(_RANK + 2 * _STATE, inner),
            "ssm_dt.weight": matrix(inner, _RANK),
            "ssm_dt.bias": np.zeros(inner, np.float32),
            "ssm_a": np.full((inner, _STATE), -0.01, np.float32),  # it forgets slowly
            "ssm_d": np.ones(inner, np.float32),
            "ssm_out.weight": onto_stream(inner),
        }

    if architecture == "mamba":
        return [mamba(), mamba()]
    attention = {f"attn_{name}.weight": matrix(_EMBD, _EMBD) for name in "qkv"}
    attention["attn_output.weight"] = onto_stream(_EMBD)
    if architecture == "jamba":
        sizes = {"dt": _RANK, "b": _STATE, "c": _STATE}
        norms = {f"ssm_{name}_norm.weight": np.ones(sizes[name], np.float32) for name in sizes}
        recurrent = mamba() | norms
    else:
        attention |= {f"attn_{name}_norm.weight": np.ones(_HEAD, np.float32) for name in "qk"}
        recurrent = {
            "shortconv.conv.weight": matrix(_EMBD, _CONV - 1).astype(np.float32),
            "shortconv.in_proj.weight": matrix(3 * _EMBD, _EMBD),
            "shortconv.out_proj.weight": onto_stream(_EMBD),
        }
    for block in (recurrent, attention):
        block |= {
            "ffn_norm.weight": np.ones(_EMBD, np.float32),
            "ffn_gate.weight": matrix(_FF, _EMBD),
            "ffn_up.weight": matrix(_FF, _EMBD),
            "ffn_down.weight": onto_stream(_FF),
        }
    return [recurrent, attention]


def make_drafts(path: Path) -> Path:
    """Write the layer that drafts alone, for the model of mode `cycle`, and return its path."""
    return _write(path, "cycle", 2048, _TINY, drafts=True, has_trunk=False)


def _write(
    path: Path,
    mode: tiny_gguf.Mode,
    ctx: int,
    geometry: Geometry,
    *,
    drafts: bool,
    has_trunk: bool = True,
    chat_template: str = tiny_gguf.CHAT_TEMPLATE,
) -> Path:
    tokens, types = tiny_gguf.vocabulary(0)
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_name(f"tiny hybrid {mode}")
    writer.add_context_length(ctx)
    writer.add_embedding_length(_EMBD)
    writer.add_block_count(geometry.layers + drafts)
    writer.add_feed_forward_length(_FF)
    writer.add_head_count(geometry.heads)
    writer.add_head_count_kv(geometry.kv_heads)
    writer.add_key_length(geometry.head)
    writer.add_value_length(geometry.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_dimension_sections([6, 5, 5, 0])
    writer.add_ssm_conv_kernel(_CONV)
    writer.add_ssm_state_size(geometry.state)
    writer.add_ssm_group_count(geometry.key_heads)
    writer.add_ssm_time_step_rank(geometry.value_heads)
    writer.add_ssm_inner_size(geometry.inner)
    writer.add_uint32(f"{_ARCHITECTURE}.full_attention_interval", geometry.interval)
    if drafts:
        writer.add_uint32(f"{_ARCHITECTURE}.nextn_predict_layers", 1)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tiny_gguf.add_tokenizer(writer, tokens, types, chat_template)
    found = _tensors(mode, tokens, types, geometry, drafts=drafts).items()
    trunk = tuple(f"blk.{layer}." for layer in range(geometry.layers))
    kept = ((name, entry) for name, entry in found if has_trunk or not name.startswith(trunk))
    tiny_gguf.write(writer, kept)
    return path


def _tensors(
    mode: tiny_gguf.Mode, tokens: list[str], types: list[int], shape: Geometry, *, drafts: bool
) -> dict[str, Array]:
    random = np.random.default_rng(0)

    matrix, onto_stream = _weights(mode, random)

    def attention() -> dict[str, Array]:
        width, kv_width = shape.heads * shape.head, shape.kv_heads * shape.head
        return {
            "attn_q.weight": matrix(2 * width, _EMBD),  # with a gate
            "attn_k.weight": matrix(kv_width, _EMBD),
            "attn_v.weight": matrix(kv_width, _EMBD),
            "attn_output.weight": onto_stream(width),
            "attn_q_norm.weight": np.ones(shape.head, np.float32),
            "attn_k_norm.weight": np.ones(shape.head, np.float32),
        }

    def recurrent() -> dict[str, Array]:
        width = shape.inner + 2 * shape.key_heads * shape.state
        return {
            "attn_qkv.weight": matrix(width, _EMBD),
            "attn_gate.weight": matrix(shape.inner, _EMBD),
            "ssm_conv1d.weight": matrix(width, _CONV).astype(np.float32),
            "ssm_dt.bias": np.zeros(shape.value_heads, np.float32),
            "ssm_a": np.full(shape.value_heads, -0.01, np.float32),  # it forgets slowly
            "ssm_alpha.weight": matrix(shape.value_heads, _EMBD),
            "ssm_beta.weight": matrix(shape.value_heads, _EMBD),
            "ssm_norm.weight": np.ones(shape.state, np.float32),
            "ssm_out.weight": onto_stream(shape.inner),
        }

    def draft() -> dict[str, Array]:
        # It takes the embedding of the latest token and not the state of the stream.
        both = np.hstack([np.eye(_EMBD), np.zeros((_EMBD, _EMBD))]).astype(np.float16)
        norms = dict.fromkeys(("nextn.enorm.weight", "nextn.hnorm.weight"), norm)
        return {"nextn.eh_proj.weight": both, **norms}

    norm = np.ones(_EMBD, np.float32)
    embedding, output = tiny_gguf.ends(mode, tokens, types, _EMBD, random)
    blocks = [
        attention() if layer % shape.interval == 0 else recurrent()
        for layer in range(1, shape.layers + 1)
    ]
    if drafts:
        blocks.append(attention() | draft())
    found = {
        "token_embd.weight": embedding,
        "output_norm.weight": norm,
        "output.weight": output,
    }
    for layer, block in enumerate(blocks):
        block |= {
            "attn_norm.weight": norm,
            "post_attention_norm.weight": norm,
            "ffn_gate.weight": matrix(_FF, _EMBD),
            "ffn_up.weight": matrix(_FF, _EMBD),
            "ffn_down.weight": onto_stream(_FF),
        }
        found |= {f"blk.{layer}.{name}": weights for name, weights in block.items()}
    return found
