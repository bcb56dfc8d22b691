"""An adapted number of slots, each with the context it would have without. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from supervisor.flags.auto import (
    PlanInputs,
    cache_count,
    cache_layout,
    context_bytes,
    ctx_slot,
    positive,
    slots,
)
from supervisor.flags.setting import Setting, Settings, values
from supervisor.memory.context import Chosen

SLOTS: Final = "parallel"
CONTEXT: Final = "ctx-size"


def adapt_slots(derived: Settings, inputs: PlanInputs) -> dict[str, Setting]:
    """The slots and the context that replace derived ones; nothing where slots share a cache.

    Fewer slots than wanted where memory does not hold their contexts, and never a shorter context:
    a conversation that fitted into a slot must fit into one of the next instance.
    """
    adapted, chosen = inputs.adapted[SLOTS], values(derived)
    each, before = ctx_slot(chosen), slots(chosen)
    wanted = positive(SLOTS, adapted.value)
    if cache_count(chosen) != before:
        return {}
    count = wanted
    while count > before and not _fits(inputs, {**chosen, SLOTS: count}, each):
        count = max(before, count // 2)
    if count == before:
        return {}
    reason = f"{count} slots, {each} tokens per slot as with {before} slots"
    return {
        SLOTS: adapted if count == wanted else _fewer(adapted, count),
        CONTEXT: Setting(each * count, adapted.origin, reason),
    }


def _fits(inputs: PlanInputs, chosen: Chosen, each: int) -> bool:
    types = str(chosen.get("cache-type-k", "f16")), str(chosen.get("cache-type-v", "f16"))
    cache = cache_layout(chosen, each, *types)
    return context_bytes(inputs.gguf, chosen, cache) <= inputs.kv_budget_bytes


def _fewer(adapted: Setting, count: int) -> Setting:
    return replace(adapted, value=count, reason=f"{adapted.reason}; memory holds {count}")
