"""Size of an engine's compute buffers. Pure."""

from __future__ import annotations

from typing import Final

from supervisor.gguf.metadata import Gguf
from supervisor.memory.context import ContextLayout

# Before it serves, an engine builds the graph of its largest micro batch and reserves its peak
# memory. Where the peak lies depends on the model and the context:
#
#     masks     = tokens x cells x (2 with flash attention, else 4), for each kind of layer
#     feed      = tokens x 4 x (3 F + 3 E + Q); of experts, 3 F + (3 + experts) E + Q
#     attend    = tokens x 4 x max(5 E, 3 E + Q + K + V) with flash attention
#               = tokens x 4 x (3 E + 2 Q + 2 K + 2 V + heads x cells) without
#     logits    = outputs x 4 x (vocabulary + 2 E) + tokens x 4 x E
#     bytes     = 20 tokens + the larger of: masks and feed or attend; logits
#
# E is the width of the residual stream, F of the feed-forward layer, Q, K, V of a token's queries,
# keys and values in one layer; cells are those of one cache.
#
# The terms were found on build 10434 with small models of every shape, and hold to 1 % for f16
# caches of SmolLM2-135M and Gemma-3-270M but for a few, to 10 % for quantised ones, whose keys are
# rotated. scripts/bench/memory compares them with an engine. A model of experts, and the share of a
# device, follow the source (llama-graph.cpp), not measurements.

_VALUE: Final = 4
_MASK_FLASH: Final = 2
_MASK: Final = 4
# Token, position and the places in the cache where its keys and values go.
_INPUTS_PER_TOKEN: Final = 20


def compute_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    """The compute buffer where the layers are."""
    inside = layout.tokens * _VALUE * max(_feed(gguf), _attend(gguf, layout))
    stream = layout.tokens * _VALUE * gguf.embedding_length
    logits = layout.outputs * _VALUE * (gguf.vocab_size + 2 * gguf.embedding_length) + stream
    return max(_masks(gguf, layout) + inside, logits) + layout.tokens * _INPUTS_PER_TOKEN


def input_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    """The host's compute buffer if all layers are on devices."""
    embeddings = layout.tokens * _VALUE * gguf.embedding_length
    return _masks(gguf, layout) + embeddings + layout.tokens * _INPUTS_PER_TOKEN


def output_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    """The host buffer that receives the logits."""
    return layout.cache.slots * gguf.vocab_size * _VALUE


def _masks(gguf: Gguf, layout: ContextLayout) -> int:
    cells = layout.cache.cells
    if any(gguf.sliding):
        cells += layout.cache.sliding_cells(gguf.sliding_window or 0)
    return layout.tokens * cells * (_MASK_FLASH if layout.flash else _MASK)


def _feed(gguf: Gguf) -> int:
    streams = (3 + gguf.experts_used) * gguf.embedding_length
    return 3 * gguf.feed_forward + streams + gguf.heads * gguf.key_length


def _attend(gguf: Gguf, layout: ContextLayout) -> int:
    stream, queries = gguf.embedding_length, gguf.heads * gguf.key_length
    kept = max(gguf.kv_heads, default=0) * (gguf.key_length + gguf.value_length)
    if layout.flash:
        return max(5 * stream, 3 * stream + queries + kept)
    return 3 * stream + 2 * (queries + kept) + gguf.heads * layout.cache.cells
