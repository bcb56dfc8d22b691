"""Size of a KV cache. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.models.metadata import Gguf

#     cells = context of a sequence's cache, rounded up to 256
#     bytes = caches x sum over layers of
#             cells x kv_heads x (key_length x B(K) + value_length x B(V))
#
# There is one cache per slot, or one for all slots with --kv-unified. A layer with a sliding window
# keeps its window (of every slot, if unified) and a micro batch, rounded up likewise.
#
# Checked against build 10434, SmolLM2-135M and Gemma-3-270M, to the last digit of its log.
#
# Source: ggml-common.h for the block sizes; llama-kv-cache.cpp and llama-kv-cache-iswa.cpp for the
# cells.

BYTES_PER_VALUE: Final[Mapping[str, float]] = MappingProxyType(
    {
        "f32": 4,
        "f16": 2,
        "bf16": 2,
        "q8_0": 34 / 32,
        "q5_1": 24 / 32,
        "q5_0": 22 / 32,
        "q4_1": 20 / 32,
        "q4_0": 18 / 32,
        "iq4_nl": 18 / 32,
    }
)
UNQUANTISED: Final = frozenset({"f32", "f16", "bf16"})
PADDING_TOKENS: Final = 256
# Values per quantisation block, within one head.
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Cache:
    """The shape of the caches of one instance."""

    ctx: int  # tokens of one cache
    streams: int = 1  # number of caches: one per slot, or one
    slots: int = 1
    ubatch: int = 512  # tokens of a micro batch
    type_k: str = "f16"  # type of the keys, such as `q8_0`
    type_v: str = "f16"  # type of the values
    # Whether sliding-window layers keep as much as all others (`--swa-full`).
    full_window: bool = False

    @property
    def cells(self) -> int:
        """Tokens that a layer without a window keeps in one cache."""
        return _pad_tokens(self.ctx)

    def sliding_cells(self, window: int) -> int:
        """Tokens that a layer with a window keeps in one cache."""
        if self.full_window:
            return self.cells
        seen = window * (self.slots // max(1, self.streams)) + self.ubatch
        return min(self.cells, _pad_tokens(seen))


def layer_bytes(gguf: Gguf, cache: Cache) -> tuple[int, ...]:
    """Bytes of each layer in all caches together; 0 for a model that is not causal."""
    if not gguf.is_causal:
        return (0,) * len(gguf.kv_heads)
    cells = {
        False: cache.cells,
        True: cache.sliding_cells(gguf.sliding_window or 0),
    }
    return tuple(
        round(cache.streams * cells[is_sliding] * heads * _head_bytes(gguf, cache))
        for heads, is_sliding in zip(gguf.kv_heads, gguf.sliding, strict=True)
    )


def cache_bytes(gguf: Gguf, cache: Cache) -> int:
    return sum(layer_bytes(gguf, cache))


def checkpoint_bytes(gguf: Gguf, cache: Cache) -> int:
    """Size of one checkpoint of a sequence.

    It holds what truncating a cache cannot restore: the window of sliding-window layers, and the
    state of recurrent ones. Gemma-3-270M, build 10434: 7.5 MiB for a window of 512.
    """
    heads = sum(n for n, is_sliding in zip(gguf.kv_heads, gguf.sliding, strict=True) if is_sliding)
    if cache.full_window or cache.ctx <= (gguf.sliding_window or 0):
        heads = 0
    window = gguf.sliding_window or 0
    return round(window * heads * _head_bytes(gguf, cache)) + state_bytes(gguf)


def state_bytes(gguf: Gguf) -> int:
    """State of recurrent layers for one sequence. Source: llama-memory-recurrent.cpp."""
    return gguf.state_values * 4


def can_quantise(gguf: Gguf) -> bool:
    """Whether the heads consist of whole blocks."""
    return gguf.key_length % BLOCK == 0 and gguf.value_length % BLOCK == 0


def _head_bytes(gguf: Gguf, cache: Cache) -> float:
    """Bytes per token of one head of one layer."""
    key = gguf.key_length * BYTES_PER_VALUE.get(cache.type_k, 2)
    return key + gguf.value_length * BYTES_PER_VALUE.get(cache.type_v, 2)


def _pad_tokens(tokens: int) -> int:
    return -(-tokens // PADDING_TOKENS) * PADDING_TOKENS
