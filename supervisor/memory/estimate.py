"""How much main memory and device memory one instance takes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Final

from supervisor.engines.discover import Device
from supervisor.engines.spec_types import MTP, draft_limits, spec_types
from supervisor.gguf.ggml_types import block_bytes
from supervisor.gguf.metadata import Gguf
from supervisor.memory import kv_cache
from supervisor.memory.compute import compute_bytes, input_bytes, output_bytes
from supervisor.memory.context import Chosen, ContextLayout, context_layout, draft_layout
from supervisor.memory.inputs import MemoryBreakdown, MemoryInputs, WorkerMemory
from supervisor.memory.offload import (
    count_offloaded,
    devices_of,
    is_fitted,
    layers_left,
    moved_kv,
    moved_weights,
    on_devices,
    split_between,
)

#     weights        the file's tensors; if mapped, shared by all processes that map it
#     copies         matrices that the CPU backend repacks
#     kv             KV caches, and the states of recurrent layers
#     compute        compute buffers of a micro batch
#     output         logits
#     prompt cache   prompts without a slot, at most (--cache-ram)
#     checkpoints    saved states of models whose caches cannot be truncated, at most
#     draft          all of the above of a draft model
#     projector      the file that makes images or audio into tokens
#     base           the program, its libraries and its vocabulary
#
# The prompt cache and the checkpoints grow with use; all else is allocated at the start. Options in
# `args`, which are passed on unchecked, are ignored.

__all__ = ["Estimate", "MemoryBreakdown", "MemoryInputs", "estimate"]

_MIB: Final = 1024**2
# Resident memory of build 10434 with its libraries and a vocabulary of 416 tokens, and of each
# further token: 49 152 of SmolLM2 with as many merges, 262 144 of Gemma-3 without.
_BASE_BYTES: Final = 33 * _MIB
_BYTES_PER_TOKEN: Final = 160
_BYTES_PER_TOKEN_MERGED: Final = 270

# Types that the CPU backend repacks, by the processor feature; AMX goes first.
# Source: ggml-cpu/repack.cpp, ggml_repack_get_optimal_repack_type; ggml-cpu/amx/common.h,
# qtype_has_amx_kernels.
_REPACKED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "avx2": frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}),
        "avx512f": frozenset({"Q2_K"}),
        "asimddp": frozenset({"Q4_0", "Q4_K", "IQ4_NL"}),
    }
)
_AMX: Final = "amx_int8"
_AMX_ROWS: Final = 32
# Bytes that AMX adds to each block. Source: ggml-cpu/amx/mmq.cpp, get_row_size; build 10434 logs
# the same.
_AMX_EXTRA_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"F16": 0, "Q4_0": 0, "Q4_1": 0, "Q6_K": 0, "Q8_0": 4, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}
)
_REPACK_ROWS: Final = 8


@dataclass(frozen=True, slots=True)
class Estimate:
    """Memory of one instance."""

    host: MemoryBreakdown
    devices: Mapping[str, MemoryBreakdown]  # by device name; empty if nothing is offloaded
    mapped_bytes: int  # of main memory, what all instances that map the same file share
    layers_offloaded: int  # layers on devices; the output counts as one
    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)  # by name
    # Whether the engine itself puts fewer layers on devices where less is free.
    is_fitted: bool = False

    @property
    def own_bytes(self) -> int:
        """Main memory that no other instance shares."""
        return self.host.total - self.mapped_bytes + self.local_workers_bytes

    @property
    def own_at_start_bytes(self) -> int:
        """Of `own_bytes`, the part allocated before the first request."""
        return self.host.at_start - self.mapped_bytes + self.local_workers_bytes

    @property
    def local_workers_bytes(self) -> int:
        """Main memory that workers on this machine take for it."""
        return sum(one.taken.at_start for one in self.workers.values() if one.is_main_memory)


def estimate(memory_inputs: MemoryInputs) -> Estimate:
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    layout = context_layout(gguf, chosen, memory_inputs.engine)
    devices = devices_of(memory_inputs)
    draft = _draft_bytes(memory_inputs, layout)
    count = count_offloaded(memory_inputs, layout, devices, draft + memory_inputs.projector_bytes)
    on_host = count <= gguf.layers
    is_mapped = _is_mapped(chosen)
    extra_bytes = (draft + memory_inputs.projector_bytes) if count else 0
    host = MemoryBreakdown(
        weights=gguf.tensor_bytes - moved_weights(gguf, count),
        copies=_copies(gguf, memory_inputs) * layers_left(gguf, count) // max(1, gguf.layers),
        kv=_kv_bytes(gguf, layout) - moved_kv(gguf, layout, count, chosen),
        compute=compute_bytes(gguf, layout) if on_host else input_bytes(gguf, layout),
        output=output_bytes(gguf, layout),
        prompt_cache=layout.prompt_cache_bytes,
        checkpoints=layout.checkpoints
        * layout.cache.slots
        * kv_cache.checkpoint_bytes(gguf, layout.cache),
        draft=0 if extra_bytes else draft,
        projector=0 if extra_bytes else memory_inputs.projector_bytes,
        base=_base_bytes(gguf),
    )
    taken = split_between(
        on_devices(memory_inputs, layout, count, extra_bytes), devices, memory_inputs.chosen
    )
    here = {one.name for one in devices if one.worker is None}
    return Estimate(
        host=host,
        devices={name: one for name, one in taken.items() if name in here},
        mapped_bytes=host.weights if is_mapped else 0,
        layers_offloaded=count,
        workers=_by_worker(taken, devices),
        is_fitted=is_fitted(memory_inputs, devices),
    )


def _by_worker(
    taken: Mapping[str, MemoryBreakdown], devices: tuple[Device, ...]
) -> Mapping[str, WorkerMemory]:
    names = dict.fromkeys(one.worker for one in devices if one.worker and one.name in taken)
    return {
        name: _of_worker([one for one in devices if one.worker == name], taken) for name in names
    }


def _of_worker(devices: list[Device], taken: Mapping[str, MemoryBreakdown]) -> WorkerMemory:
    parts = [taken[one.name] for one in devices if one.name in taken]
    return WorkerMemory(
        taken=MemoryBreakdown(
            **{
                each.name: sum(getattr(one, each.name) for one in parts)
                for each in fields(parts[0])
            }
        ),
        has_bytes=sum(one.total_mib for one in devices) * _MIB,
        free_bytes=_free_bytes(devices),
        is_main_memory=any(one.is_main_memory for one in devices),
    )


def _free_bytes(devices: list[Device]) -> int | None:
    free_mib = [one.free_mib for one in devices if one.free_mib is not None]
    return sum(free_mib) * _MIB if len(free_mib) == len(devices) else None


def _kv_bytes(gguf: Gguf, layout: ContextLayout) -> int:
    return (
        kv_cache.cache_bytes(gguf, layout.cache) + kv_cache.state_bytes(gguf) * layout.cache.slots
    )


def _draft_bytes(memory_inputs: MemoryInputs, layout: ContextLayout) -> int:
    """A draft model has a context of its own, of the same size; so have draft layers (MTP)."""
    own, draft = draft_layout(layout, memory_inputs.chosen), memory_inputs.draft
    if draft is None:
        return _draft_layers_bytes(memory_inputs, own)
    buffers = compute_bytes(draft, own) + output_bytes(draft, own)
    weights = draft.tensor_bytes + _copies(draft, memory_inputs)
    return weights + _kv_bytes(draft, own) + buffers


def _draft_layers_bytes(memory_inputs: MemoryInputs, own: ContextLayout) -> int:
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    if not gguf.draft_layers or MTP not in spec_types(chosen):
        return 0
    # A recurrent state is kept for each drafted token, to go back to.
    drafted = max(int(chosen.get(key, default)) for key, default in draft_limits(chosen))
    states = kv_cache.state_bytes(gguf) * own.cache.slots * drafted
    count, heads = gguf.draft_layers, max(gguf.kv_heads, default=0)
    layers = replace(gguf, kv_heads=(heads,) * count, sliding=(False,) * count)
    buffers = compute_bytes(gguf, own) + output_bytes(gguf, own)
    return kv_cache.cache_bytes(layers, own.cache) + states + buffers


def _base_bytes(gguf: Gguf) -> int:
    each = _BYTES_PER_TOKEN_MERGED if gguf.tokenizer == "gpt2" else _BYTES_PER_TOKEN
    return _BASE_BYTES + each * gguf.vocab_size


def _copies(gguf: Gguf, memory_inputs: MemoryInputs) -> int:
    if memory_inputs.chosen.get("repack") is False:
        return 0
    flags = memory_inputs.cpu_flags
    kinds = frozenset[str]().union(*(_REPACKED[one] for one in flags & _REPACKED.keys()))
    # The portable CPU library has no AMX.
    has_amx = _AMX in flags and not memory_inputs.engine.library_dirs
    total = 0
    for kind, rows, size in gguf.matrix_bytes:
        if has_amx and kind in _AMX_EXTRA_BYTES and rows >= _AMX_ROWS:
            total += size + size // block_bytes(kind) * _AMX_EXTRA_BYTES[kind]
        elif kind in kinds and rows >= _REPACK_ROWS:
            total += size
    return total


def _is_mapped(chosen: Chosen) -> bool:
    mode = str(chosen.get("load-mode", "mmap"))
    return chosen.get("mmap") is not False and ("mmap" in mode or mode == "auto")
