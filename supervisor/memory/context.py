"""The sizes that an engine derives from its options, with its own defaults. Pure.

Source: llama-server --help, build 10434; common/arg.cpp; its log at `llama_context`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from supervisor.engines.discover import Engine
from supervisor.engines.help import FlagValue
from supervisor.engines.spec_types import draft_limits
from supervisor.gguf.embedding import embedding
from supervisor.gguf.metadata import Gguf
from supervisor.memory.kv_cache import Cache

_MIB: Final = 1024**2
# Engines parse numbers as signed 32-bit integers. Source: llama.cpp, common/arg.cpp.
NUMBER_MAX: Final = 2**31 - 1
_CTX: Final = 4096
_SLOTS: Final = 4
_BATCH: Final = 2048
_UBATCH: Final = 512
_CACHE_RAM_MIB: Final = 8192
_CHECKPOINTS: Final = 32
_CHECKPOINT_STEP: Final = 8192
# Two more are created at the end of each prompt. Source: log of build 10434, "created context
# checkpoint".
_CHECKPOINTS_OF_PROMPT: Final = 2
# Before this build a whole micro batch got rows of logits. Source: llama.cpp, pull request
# 23861, of 2026-06-01; the build number is approximate.
_FEW_OUTPUTS_BUILD: Final = 9480

Chosen = Mapping[str, FlagValue]


@dataclass(frozen=True, slots=True)
class ContextLayout:
    """The sizes that memory follows from."""

    cache: Cache
    tokens: int  # tokens of a micro batch
    outputs: int  # rows of logits computed together at most
    flash: bool
    prompt_cache_bytes: int  # limit of the prompt cache in main memory
    checkpoints: int  # checkpoints per slot at most


def context_layout(gguf: Gguf, chosen: Chosen, engine: Engine) -> ContextLayout:
    """The layout of a model under options by today's names."""
    slots = number(chosen, "parallel", _SLOTS)
    # Without --parallel the engine has four slots that share one cache.
    unified = chosen.get("kv-unified", "parallel" not in chosen) is True
    streams = 1 if unified else slots
    ctx = number(chosen, "ctx-size", 0) or gguf.ctx_train or _CTX
    batch = min(ctx, number(chosen, "batch-size", _BATCH))
    ubatch = min(batch, number(chosen, "ubatch-size", _UBATCH))
    has_few_outputs = engine.build is None or engine.build >= _FEW_OUTPUTS_BUILD
    few = min(batch, slots * (1 + _drafted(chosen))) if has_few_outputs else ubatch
    cache = Cache(
        ctx=-(-ctx // streams),
        streams=streams,
        slots=slots,
        ubatch=ubatch,
        type_k=str(chosen.get("cache-type-k", "f16")),
        type_v=str(chosen.get("cache-type-v", "f16")),
        full_window=chosen.get("swa-full") is True,
    )
    return ContextLayout(
        cache=cache,
        tokens=ubatch,
        outputs=_outputs(gguf, chosen, ubatch, few),
        flash=chosen.get("flash-attn", "auto") not in {"off", False},
        prompt_cache_bytes=_prompt_cache_bytes(chosen, engine),
        checkpoints=_checkpoints(chosen, engine, cache.ctx),
    )


def _outputs(gguf: Gguf, chosen: Chosen, ubatch: int, few: int) -> int:
    """Rows of logits; embeddings have one per token, a model that generates no text has none.

    Source: llama_context's log, n_outputs_max.
    """
    if not gguf.is_causal:
        return 0
    return ubatch if embedding(gguf, chosen) else few


def draft_layout(model: ContextLayout, chosen: Chosen) -> ContextLayout:
    """The layout of a draft model beside the layout of its model."""
    cache = replace(
        model.cache,
        type_k=str(chosen.get("spec-draft-type-k", "f16")),
        type_v=str(chosen.get("spec-draft-type-v", "f16")),
    )
    return replace(model, cache=cache, outputs=cache.slots, prompt_cache_bytes=0, checkpoints=0)


def number(chosen: Chosen, key: str, default: int) -> int:
    """An option as a number, or the default if no engine would accept it."""
    try:
        found = int(chosen.get(key, default))
    except (ValueError, OverflowError):
        return default
    return found if 0 <= found <= NUMBER_MAX else default


def _drafted(chosen: Chosen) -> int:
    return max((number(chosen, key, default) for key, default in draft_limits(chosen)), default=0)


def _prompt_cache_bytes(chosen: Chosen, engine: Engine) -> int:
    if engine.flags.find("cache-ram") is None:
        return 0
    return number(chosen, "cache-ram", _CACHE_RAM_MIB) * _MIB


def _checkpoints(chosen: Chosen, engine: Engine, ctx: int) -> int:
    if engine.flags.find("ctx-checkpoints") is None:
        return 0
    most = number(chosen, "ctx-checkpoints", _CHECKPOINTS)
    if engine.flags.find("checkpoint-min-step") is None:
        return most
    step = number(chosen, "checkpoint-min-step", _CHECKPOINT_STEP)
    return min(most, ctx // step + _CHECKPOINTS_OF_PROMPT) if step else most
