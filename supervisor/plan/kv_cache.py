"""Computes the size of a KV cache. Pure.

    cells = context of a sequence's cache, rounded up to 256
    bytes = caches x sum over layers of
            cells x kv_heads x (key_length x B(K) + value_length x B(V))

There is a cache for each slot, or a single cache for all slots with --kv-unified. A layer with a
sliding window keeps its window (of every slot, if unified) and a micro batch, rounded up to 256.

The formula agrees to the last digit with the log of build 10434, for SmolLM2-135M and Gemma-3-270M.
Source: ggml-common.h for the block sizes; llama-kv-cache.cpp and llama-kv-cache-iswa.cpp for the
cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from supervisor.models.metadata import Gguf

BYTES_PER_VALUE: Final[Mapping[str, float]] = {
    "f32": 4, "f16": 2, "bf16": 2, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
    "q4_1": 20 / 32, "q4_0": 18 / 32, "iq4_nl": 18 / 32,
}  # fmt: skip
UNQUANTISED: Final = frozenset({"f32", "f16", "bf16"})
PADDING_TOKENS: Final = 256
# Values per quantisation block, within one head.
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Cache:
    ctx: int  # tokens of a cache
    streams: int = 1  # number of caches: one per slot, or 1
    slots: int = 1
    ubatch: int = 512  # tokens of a micro batch
    type_k: str = "f16"  # type of the keys, such as `q8_0`
    type_v: str = "f16"  # type of the values
    full_window: bool = False  # whether sliding-window layers keep the whole context (--swa-full)

    @property
    def cells(self) -> int:
        """Tokens that a layer without a window keeps in a cache."""
        return _pad_tokens(self.ctx)

    def sliding_cells(self, window: int) -> int:
        """Return the tokens that a layer with a window keeps in a cache."""
        if self.full_window:
            return self.cells
        seen = window * (self.slots // max(1, self.streams)) + self.ubatch
        return min(self.cells, _pad_tokens(seen))


def layer_bytes(gguf: Gguf, cache: Cache) -> tuple[int, ...]:
    """Return the bytes of each layer in all caches together; 0 for a model that is not causal."""
    if not gguf.is_causal:
        return (0,) * len(gguf.kv_heads)
    cells = {False: cache.cells, True: cache.sliding_cells(gguf.sliding_window or 0)}
    return tuple(
        round(cache.streams * cells[is_sliding] * heads * _head_bytes(gguf, cache))
        for heads, is_sliding in zip(gguf.kv_heads, gguf.sliding, strict=True)
    )


def cache_bytes(gguf: Gguf, cache: Cache) -> int:
    return sum(layer_bytes(gguf, cache))


def checkpoint_bytes(gguf: Gguf, cache: Cache) -> int:
    """Return the size of a checkpoint of a sequence.

    A checkpoint keeps the parts of a cache that truncating cannot restore: the window of
    sliding-window layers, and the state of recurrent layers. Gemma-3-270M, build 10434: 7.5 MiB for
    a window of 512.
    """
    heads = sum(n for n, is_sliding in zip(gguf.kv_heads, gguf.sliding, strict=True) if is_sliding)
    if cache.full_window or cache.ctx <= (gguf.sliding_window or 0):
        heads = 0
    window = gguf.sliding_window or 0
    return round(window * heads * _head_bytes(gguf, cache)) + state_bytes(gguf)


def state_bytes(gguf: Gguf) -> int:
    """Return the state of recurrent layers for a sequence. Source: llama-memory-recurrent.cpp."""
    return gguf.state_values * 4


def can_quantise(gguf: Gguf) -> bool:
    return gguf.key_length % BLOCK == 0 and gguf.value_length % BLOCK == 0


def _head_bytes(gguf: Gguf, cache: Cache) -> float:
    key = gguf.key_length * BYTES_PER_VALUE.get(cache.type_k, 2)
    return key + gguf.value_length * BYTES_PER_VALUE.get(cache.type_v, 2)


def _pad_tokens(tokens: int) -> int:
    return -(-tokens // PADDING_TOKENS) * PADDING_TOKENS
