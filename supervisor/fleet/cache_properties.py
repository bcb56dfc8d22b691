"""What the proxy is told of the caches of an instance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from supervisor.flags.plan import Plan
from supervisor.memory.context import context_layout
from supervisor.memory.kv_cache import BYTES_PER_VALUE, PADDING_TOKENS, Cache, cache_bytes
from supervisor.slot_store.catalogue import key_digest
from supervisor.slot_store.manifest import cache_key


@dataclass(frozen=True, slots=True)
class CacheProperties:
    """As of the proxy's `Upstream`."""

    cache_key: str = ""
    token_bytes: float = 0.0
    state_bytes: int = 0
    host_cache_bytes: float = 0.0


def cache_properties(plan: Plan) -> CacheProperties:
    """Return what a run of a plan has; reads the metadata of the files that its options name."""
    key, inputs = cache_key(plan), plan.memory_inputs
    layout = context_layout(inputs.gguf, inputs.chosen, inputs.engine)
    size_bytes = layout.prompt_cache_bytes
    return CacheProperties(
        cache_key=key_digest(plan.model, key) if plan.has_own_slots else "",
        token_bytes=_token_bytes(plan, layout.cache),
        state_bytes=key.state_bytes or 0,
        host_cache_bytes=math.inf if size_bytes < 0 else size_bytes,
    )


def _token_bytes(plan: Plan, cache: Cache) -> float:
    """Return the bytes of a token in a slot; 0 for a type whose size is not known."""
    if not {cache.type_k, cache.type_v} <= BYTES_PER_VALUE.keys():
        return 0.0
    one = Cache(PADDING_TOKENS, type_k=cache.type_k, type_v=cache.type_v, full_window=True)
    return cache_bytes(plan.gguf, one) / PADDING_TOKENS
