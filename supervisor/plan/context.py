"""Computes the sizes that an engine derives from its options, with its own defaults. Pure.

These are context, batches and compute buffers. A slot that embeds takes its text in a single micro
batch, unless the pooling is `last` and the model has a KV cache. Source: llama.cpp,
tools/server/server-context.cpp, server_slot::can_split.

Source of sizes: llama-server --help, build 10434; common/arg.cpp; its log at `llama_context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue, draft_limits
from supervisor.models.metadata import Gguf
from supervisor.plan.kv_cache import Cache

# The engine's default. Source: --help, --ubatch-size.
_SPLIT_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Embedding:
    pooling: str  # `none`, `mean`, `cls`, `last` or `rank`
    is_only: bool  # whether it generates no text
    can_split: bool  # whether a text may be computed in several micro batches

    def micro_batch(self, ctx: int) -> int:
        """Return the tokens of a micro batch for inputs of up to `ctx` tokens."""
        return min(ctx, _SPLIT_TOKENS) if self.can_split else ctx


def embedding(gguf: Gguf, chosen: Mapping[str, FlagValue]) -> Embedding | None:
    """Return how a model makes embeddings under its options; None if it makes none."""
    ranks = chosen.get("rerank") is True
    if not ranks and chosen.get("embedding") is not True:
        return None
    pooling = str(chosen.get("pooling", "rank" if ranks else gguf.pooling or "none"))
    return Embedding(
        pooling=pooling,
        is_only=ranks or not gguf.is_causal or gguf.pooling is not None,
        can_split=pooling == "last" and gguf.is_causal,
    )


_MIB: Final = 1024**2
# Engines parse numbers as signed 32-bit integers. Source: llama.cpp, common/arg.cpp.
NUMBER_MAX: Final = 2**31 - 1
_CTX: Final = 4096
_SLOTS: Final = 4
# The end of each prompt adds two checkpoints. Source: log of build 10434, "created context
# checkpoint".
_CHECKPOINTS_OF_PROMPT: Final = 2
# Before this build there was a row of logits for each token of a micro batch. Source: llama.cpp,
# pull request 23861, of 2026-06-01; the build number is approximate.
_FEW_OUTPUTS_BUILD: Final = 9480

Chosen = Mapping[str, FlagValue]


@dataclass(frozen=True, slots=True)
class ContextLayout:
    cache: Cache
    tokens: int  # tokens of a micro batch
    outputs: int  # rows of logits computed together at most
    flash: bool
    prompt_cache_bytes: int = 0  # limit of the prompt cache in main memory
    checkpoints: int = 0  # checkpoints per slot at most


def context_layout(gguf: Gguf, chosen: Chosen, engine: Engine) -> ContextLayout:
    slots = number(chosen, "parallel", _SLOTS)
    # Without --parallel the engine has four slots that share one cache.
    unified = chosen.get("kv-unified", "parallel" not in chosen) is True
    streams = 1 if unified else slots
    ctx = number(chosen, "ctx-size", 0) or gguf.ctx_train or _CTX
    batch = min(ctx, number(chosen, "batch-size", 2048))
    ubatch = min(batch, number(chosen, "ubatch-size", 512))
    # Rows of logits: one for each token if there are embeddings, none without a causal model.
    # Source: llama_context's log, n_outputs_max.
    outputs = ubatch if gguf.is_causal else 0
    has_few_outputs = engine.build is None or engine.build >= _FEW_OUTPUTS_BUILD
    if gguf.is_causal and has_few_outputs and not embedding(gguf, chosen):
        drafted = (number(chosen, key, default) for key, default in draft_limits(chosen))
        outputs = min(batch, slots * (1 + max(drafted, default=0)))
    has_prompt_cache = engine.flags.find("cache-ram") is not None
    cache = cache_of(chosen, -(-ctx // streams), streams, slots, ubatch)
    return ContextLayout(
        cache=cache,
        tokens=ubatch,
        outputs=outputs,
        flash=chosen.get("flash-attn", "auto") not in {"off", False},
        prompt_cache_bytes=number(chosen, "cache-ram", 8192) * _MIB if has_prompt_cache else 0,
        checkpoints=_checkpoints(chosen, engine, cache.ctx),
    )


def cache_of(chosen: Chosen, ctx: int, streams: int, slots: int, ubatch: int) -> Cache:
    type_k, type_v = (str(chosen.get(f"cache-type-{letter}", "f16")) for letter in "kv")
    return Cache(ctx, streams, slots, ubatch, type_k, type_v, chosen.get("swa-full") is True)


def draft_layout(model: ContextLayout, chosen: Chosen) -> ContextLayout:
    cache = replace(
        model.cache,
        type_k=str(chosen.get("spec-draft-type-k", "f16")),
        type_v=str(chosen.get("spec-draft-type-v", "f16")),
    )
    return replace(model, cache=cache, outputs=cache.slots, prompt_cache_bytes=0, checkpoints=0)


def number(chosen: Chosen, key: str, default: int) -> int:
    """Return an option as a number, or the default if no engine would accept it."""
    try:
        found = int(chosen.get(key, default))
    except (ValueError, OverflowError):
        return default
    return found if 0 <= found <= NUMBER_MAX else default


def _checkpoints(chosen: Chosen, engine: Engine, ctx: int) -> int:
    if engine.flags.find("ctx-checkpoints") is None:
        return 0
    most = number(chosen, "ctx-checkpoints", 32)
    if engine.flags.find("checkpoint-min-step") is None:
        return most
    step = number(chosen, "checkpoint-min-step", 8192)
    return min(most, ctx // step + _CHECKPOINTS_OF_PROMPT) if step else most


# Before it serves, an engine builds the graph of its largest micro batch and reserves its peak
# memory. The operation with the peak depends on the model and the context:
#
#     masks     = tokens x cells x (2 with flash attention, else 4), for each kind of layer
#     feed      = tokens x 4 x (3 F + 3 E + Q)
#               = tokens x 4 x (2 E + Q + X + F) with experts, or 2 X with a shared one, if larger
#     on device = tokens x 4 x (2 E + 2 F + X + 2 N) with experts, and 2 S with a shared one
#     multiply  = tokens x 4 x (2 E + F + X + 2 N), and a copy of the matrix, if it is in another
#               memory; F more, which is free but too small for what follows, if only the `down`
#               experts are copied, or with one of the other two if X is larger than F
#     attend    = tokens x 4 x max(5 E, 3 E + Q + K + V) with flash attention
#               = tokens x 4 x (3 E + 2 Q + 2 K + 2 V + heads x cells) without
#     logits    = outputs x 4 x (vocabulary + 2 E) + tokens x 4 x E
#     bytes     = 20 tokens + the larger of: masks and the largest of the others; logits
#
# E is the width of the residual stream, F of the feed-forward layer or of all experts of a token, S
# of one expert, X the larger of F and E for each expert used, N the number of experts; Q, K and V
# are a token's queries, keys and values in a layer; cells are those of a single cache.
#
# The terms were found on build 10434 with small models of every shape. With few exceptions, they
# hold to 1 % for f16 caches of SmolLM2-135M and Gemma-3-270M, and to 10 % for quantised caches,
# whose keys are rotated. scripts/bench/memory compares them with an engine. With experts, they hold
# to 0.3 % of all memory on a CPU, and to 1.1 % on a device that has all layers.

_VALUE: Final = 4
# Token, position, and the places of its keys and values in the cache.
_INPUTS_PER_TOKEN: Final = 20


def compute_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    """Return the compute buffer in main memory if no layer is elsewhere."""
    return _peak_bytes(gguf, layout, layout.tokens * _VALUE * _feed(gguf))


def device_compute_bytes(
    gguf: Gguf, layout: ContextLayout, copied_bytes: int = 0, up_and_gate: int = 0
) -> int:
    """Return the compute buffer of a device.

    Args:
        gguf: The model.
        layout: Its context.
        copied_bytes: The largest matrix that is copied there for its multiplication.
        up_and_gate: How many of a layer's `up` and `gate` experts are there, without its `down`
            experts; 0 to 2.
    """
    fed = _feed_on_device(gguf) if gguf.experts_used else _feed(gguf)
    feed_bytes = layout.tokens * _VALUE * fed
    if copied_bytes:
        has_hole = up_and_gate == 2 or (up_and_gate == 1 and _widest(gguf) > gguf.feed_forward)
        beside = _multiply(gguf) + (gguf.feed_forward if has_hole else 0)
        feed_bytes = max(feed_bytes, copied_bytes + layout.tokens * _VALUE * beside)
    return _peak_bytes(gguf, layout, feed_bytes)


def _peak_bytes(gguf: Gguf, layout: ContextLayout, feed_bytes: int) -> int:
    inside = max(feed_bytes, layout.tokens * _VALUE * _attend(gguf, layout))
    stream = layout.tokens * _VALUE * gguf.embedding_length
    logits = layout.outputs * _VALUE * (gguf.vocab_size + 2 * gguf.embedding_length) + stream
    return max(_masks(gguf, layout) + inside, logits) + layout.tokens * _INPUTS_PER_TOKEN


def input_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    """Return the host's compute buffer if all layers are on devices."""
    embeddings = 2 * layout.tokens * _VALUE * gguf.embedding_length
    return _masks(gguf, layout) + embeddings + layout.tokens * _INPUTS_PER_TOKEN


def output_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    return layout.cache.slots * gguf.vocab_size * _VALUE


def _masks(gguf: Gguf, layout: ContextLayout) -> int:
    cells = layout.cache.cells
    if any(gguf.sliding):
        cells += layout.cache.sliding_cells(gguf.sliding_window or 0)
    return layout.tokens * cells * (2 if layout.flash else 4)


def _feed(gguf: Gguf) -> int:
    stream, inner, queries = gguf.embedding_length, gguf.feed_forward, gguf.heads * gguf.key_length
    most = 3 * inner + 3 * stream + queries
    if gguf.experts_used:
        widest = _widest(gguf)
        beside = widest if _is_shared(gguf) else inner
        most = max(most, 2 * stream + queries + widest + beside)
    return most


def _feed_on_device(gguf: Gguf) -> int:
    """Return the values per token in a layer with experts."""
    shared = 2 * gguf.feed_forward // gguf.experts_used if _is_shared(gguf) else 0
    return _multiply(gguf) + gguf.feed_forward + shared


def _multiply(gguf: Gguf) -> int:
    """Return the values per token beside the copy of a matrix of the feed-forward layer."""
    stream, inner = gguf.embedding_length, gguf.feed_forward
    return 2 * stream + inner + _widest(gguf) + 2 * gguf.experts


def _widest(gguf: Gguf) -> int:
    return max(gguf.feed_forward, gguf.experts_used * gguf.embedding_length)


def _is_shared(gguf: Gguf) -> bool:
    return any("_shexp" in name for name, _ in gguf.tensors)


def _attend(gguf: Gguf, layout: ContextLayout) -> int:
    stream, queries = gguf.embedding_length, gguf.heads * gguf.key_length
    kept = max(gguf.kv_heads, default=0) * (gguf.key_length + gguf.value_length)
    if layout.flash:
        return max(5 * stream, 3 * stream + queries + kept)
    return 3 * stream + 2 * (queries + kept) + gguf.heads * layout.cache.cells
