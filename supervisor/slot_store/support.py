"""Why the conversations of a model are not kept, where that would be in vain. Pure.

Putting a cache back must save reading it anew. Where it does not, nothing is saved, and this says
why, rather than pretending.
"""

from __future__ import annotations

from typing import Final

from supervisor.engines.spec_types import has_draft_cache, spec_types
from supervisor.flags.plan import Plan

# What an engine takes for enough where it is not told. Source: --help of build 10434.
_SIMILARITY: Final = 0.1


def unsupported_reason(plan: Plan) -> str | None:
    """Return why nothing is kept for a plan, as a clause; None where it is.

    Source: measured on build 10434. With a sliding window and without swa-full nothing of a
    restored prompt is used again, because its checkpoints are not in the file; neither is the state
    of a recurrent layer (llama.cpp #25913).
    """
    if plan.engine.flags.find("slot-save-path") is None:
        return "this build cannot save slots"
    return _of_the_model(plan) or _of_the_options(plan)


def uses_prompt_similarity(plan: Plan) -> bool:
    """Return whether the engine gives a request the slot that holds most of its prompt."""
    return float(plan.memory_inputs.chosen.get("slot-prompt-similarity", _SIMILARITY)) > 0


def _of_the_model(plan: Plan) -> str | None:
    gguf = plan.gguf
    if gguf.recurrent or 0 in gguf.kv_heads:
        return "parts of it keep a state instead of a cache, which is not saved"
    if gguf.sliding_window and not plan.memory_inputs.chosen.get("swa-full"):
        return "its sliding window is not saved; with swa-full = true it would be"
    return None


def _of_the_options(plan: Plan) -> str | None:
    chosen = plan.memory_inputs.chosen
    if chosen.get("embedding") or chosen.get("rerank"):
        return "it answers no conversations"
    if "mmproj" in chosen:
        return "prompts with pictures are not saved"
    # Not only in vain: with its draft model's cache empty the engine answers 500 (build 10434).
    if "spec-draft-model" in chosen or any(map(has_draft_cache, spec_types(chosen))):
        return "the cache of its draft model is not saved"
    if plan.slots > 1 and not uses_prompt_similarity(plan) and chosen.get("cache-ram") == 0:
        return "with several slots and cache-ram = 0 a conversation does not find its slot again"
    return None
