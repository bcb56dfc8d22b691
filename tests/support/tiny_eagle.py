"""Writes a tiny EAGLE-3 head, which drafts for a model of tiny_gguf that says the alphabet.

Also files that are recognised as other heads, which no engine loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from numpy.typing import NDArray
from support import tiny_gguf

Array = NDArray[Any]

_ARCHITECTURE: Final = "eagle3"
_FF: Final = 16
_HEADS: Final = 2


def make(path: Path, *, target: int = 64) -> Path:
    """Write a GGUF for models of width `target`, and return its path.

    The first token of each draft is right, the others are not.
    """
    tokens, types = tiny_gguf.vocabulary(0)
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    writer.add_context_length(2048)
    writer.add_embedding_length(target)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_FF)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_rope_dimension_count(target // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_array(f"{_ARCHITECTURE}.target_layers", [0, 1, 2])
    writer.add_uint32(f"{_ARCHITECTURE}.target_hidden_size", target)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    tiny_gguf.add_tokenizer(writer, tokens, types, None)
    tiny_gguf.write(writer, _tensors(tokens, types, target).items())
    return path


def make_flash(
    path: Path, *, target: int = 64, markov: bool = False, confidence: bool = False
) -> Path:
    """Write a GGUF with the names of a DFlash head, or with `markov` of a DSpark head."""
    tokens, types = tiny_gguf.vocabulary(0)
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_context_length(2048)
    writer.add_embedding_length(target)
    writer.add_block_count(1)
    writer.add_head_count(_HEADS)
    writer.add_array("dflash.target_layers", [0, 1, 2])
    if markov:
        writer.add_bool("dflash.has_confidence_head", confidence)
    tiny_gguf.add_tokenizer(writer, tokens, types, None)
    names = ("fc.weight", *(["markov_w1.weight"] if markov else []))
    tiny_gguf.write(writer, [(name, np.ones((4, target), np.float32)) for name in names])
    return path


def _tensors(tokens: list[str], types: list[int], target: int) -> dict[str, Array]:
    random = np.random.default_rng(0)
    _, output = tiny_gguf.ends("cycle", tokens, types, target, random)
    letters = [tokens.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]
    # It reads the letter before the latest one, and says the second letter after it.
    output[letters] = output[letters[-1:] + letters[:-1]]
    fused = np.hstack([np.eye(target), np.zeros((target, 2 * target))]).astype(np.float16)
    norm = np.ones(target, np.float32)
    found: dict[str, Array] = {
        "fc.weight": fused,
        "output_norm.weight": norm,
        "output.weight": output,
    }
    silent = {"attn_q": 2, "attn_k": 2, "attn_v": 2, "attn_output": 1}
    block = {name: np.zeros((target, width * target)) for name, width in silent.items()}
    block |= {name: np.zeros((_FF, target)) for name in ("ffn_gate", "ffn_up")}
    block["ffn_down"] = np.zeros((target, _FF))
    found |= {f"blk.0.{name}.weight": entry.astype(np.float16) for name, entry in block.items()}
    norms = ("attn_norm", "attn_norm_2", "ffn_norm")
    return found | {f"blk.0.{name}.weight": norm for name in norms}
