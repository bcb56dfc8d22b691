"""How many layers the memory of a worker holds. Pure."""

from __future__ import annotations

from supervisor.memory import kv_cache
from supervisor.memory.compute import compute_bytes
from supervisor.memory.context import context_layout
from supervisor.memory.inputs import MemoryInputs


def layers_held(room_bytes: int, inputs: MemoryInputs, *, has_output: bool) -> int:
    """Return how many layers, with their KV cache, fit beside the compute buffers."""
    gguf = inputs.gguf
    layout = context_layout(gguf, inputs.chosen, inputs.engine)
    output = (gguf.output_bytes or gguf.embedding_bytes) if has_output else 0
    fixed = compute_bytes(gguf, layout) + output
    weights = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    caches = kv_cache.layer_bytes(gguf, layout.cache)
    each = weights // max(1, gguf.layers) + max(caches, default=0)
    return max(0, room_bytes - fixed) // max(1, each)
