"""How much memory a KV cache takes. Pure.

    cells = context of a sequence's cache, rounded up to 256
    bytes = caches x sum over layers of cells x kv_heads x (key_length x B(K) + value_length x B(V))

There is one cache for each slot, or one for all where they are unified. A layer with a sliding
window keeps, of as many cells, only its window (of every slot, where they are unified) and a micro
batch, rounded up likewise.

Checked against build 10434, SmolLM2-135M and Gemma-3-270M, to the last digit of its log.

Source: ggml-common.h for the block sizes; llama-kv-cache.cpp and llama-kv-cache-iswa.cpp for the
cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.gguf.metadata import Gguf

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
# Values are quantised in blocks of this many, within one head.
BLOCK: Final = 32


@dataclass(frozen=True, slots=True)
class Cache:
    """The shape of the caches of one instance.

    Attributes:
        ctx: Tokens that one cache holds.
        streams: How many caches there are: one a slot, or one in all.
        slots: Sequences decoded at once.
        ubatch: Tokens of a micro batch.
        type_k: Type of the keys, such as `q8_0`.
        type_v: Type of the values.
        full_window: Whether layers with a sliding window keep as much as all others (`--swa-full`).
    """

    ctx: int
    streams: int = 1
    slots: int = 1
    ubatch: int = 512
    type_k: str = "f16"
    type_v: str = "f16"
    full_window: bool = False

    @property
    def cells(self) -> int:
        """Return the tokens that a layer without a window keeps in one cache."""
        return _padded(self.ctx)

    def sliding_cells(self, window: int) -> int:
        """Return the tokens that a layer with a window keeps in one cache."""
        if self.full_window:
            return self.cells
        seen = window * (self.slots // max(1, self.streams)) + self.ubatch
        return min(self.cells, _padded(seen))


def layer_bytes(gguf: Gguf, cache: Cache) -> tuple[int, ...]:
    """Return what each layer keeps, in all caches together; a model that is not causal, nothing."""
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
    """Return what all layers keep, in all caches together."""
    return sum(layer_bytes(gguf, cache))


def checkpoint_bytes(gguf: Gguf, cache: Cache) -> int:
    """Return the size of one checkpoint of a sequence.

    It holds what cannot be had again by cutting a cache short: the window of the layers that have
    one, and the state of recurrent ones. Gemma-3-270M, build 10434: 7.5 MiB for a window of 512.
    """
    heads = sum(n for n, is_sliding in zip(gguf.kv_heads, gguf.sliding, strict=True) if is_sliding)
    if cache.full_window or cache.ctx <= (gguf.sliding_window or 0):
        heads = 0
    window = gguf.sliding_window or 0
    return round(window * heads * _head_bytes(gguf, cache)) + state_bytes(gguf)


def state_bytes(gguf: Gguf) -> int:
    """Return what recurrent layers keep for one sequence. Source: llama-memory-recurrent.cpp."""
    return gguf.state_values * 4


def can_quantise(gguf: Gguf) -> bool:
    """Return whether the heads are made of whole blocks."""
    return gguf.key_length % BLOCK == 0 and gguf.value_length % BLOCK == 0


def _head_bytes(gguf: Gguf, cache: Cache) -> float:
    """Return what one head of one layer keeps of one token."""
    key = gguf.key_length * BYTES_PER_VALUE.get(cache.type_k, 2)
    return key + gguf.value_length * BYTES_PER_VALUE.get(cache.type_v, 2)


def _padded(tokens: int) -> int:
    return -(-tokens // PADDING_TOKENS) * PADDING_TOKENS
