"""How much memory a KV cache takes. Pure.

    cells = slots x (context of a slot, rounded up to 256)
    bytes = cells x sum over layers of kv_heads x (key_length x B(K) + value_length x B(V))

Checked against build 11434 to the byte: SmolLM2-135M (30 layers, 3 KV heads of 64) keeps 23 040
bytes a token in f16, and 45.00 MiB for 2048 tokens. Layers with a sliding window keep less, so that
for models with them this is an upper bound.

Source: ggml-common.h for the block sizes; llama-kv-cache.cpp for the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from supervisor.profile.gguf import Gguf

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
PADDING_TOKENS: Final = 256
# Values are quantised in blocks of this many, within one head.
BLOCK: Final = 32


def token_bytes(gguf: Gguf, type_k: str, type_v: str) -> float:
    """Return the bytes that one token takes in all layers; 0 for a model without such a cache."""
    key = gguf.key_length * BYTES_PER_VALUE.get(type_k, 2)
    value = gguf.value_length * BYTES_PER_VALUE.get(type_v, 2)
    return sum(gguf.kv_heads) * (key + value)


def cache_bytes(gguf: Gguf, ctx_slot: int, slots: int, type_k: str, type_v: str) -> int:
    """Return the bytes of a whole cache.

    Args:
        gguf: The model.
        ctx_slot: The context of one slot, in tokens.
        slots: How many slots have a cache of their own.
        type_k: Type of the keys, such as `q8_0`.
        type_v: Type of the values.
    """
    cells = slots * -(-ctx_slot // PADDING_TOKENS) * PADDING_TOKENS
    return round(cells * token_bytes(gguf, type_k, type_v))


def can_quantise(gguf: Gguf) -> bool:
    """Return whether the heads are made of whole blocks."""
    return gguf.key_length % BLOCK == 0 and gguf.value_length % BLOCK == 0
