"""Estimates the main memory and device memory of an instance, layer by layer. Pure.

The output is moved to devices first, then the layers from the last to the first. The table of
embeddings stays, and is copied if it serves as output. The estimate follows the engine's source. It
was compared with the log of build 10434 on Mesa's software device: weights and cache agree to the
last digit, and the total to 1 % if all layers are on the device. A device with a part of the layers
needs a larger compute buffer than estimated: for SmolLM2 with 65 536 tokens, 117 MiB instead of 78,
of 1 GiB in all.

    weights        the file's tensors; if mapped, shared by all processes that map it
    copies         matrices that the CPU backend repacks
    kv             KV caches, and the states of recurrent layers
    compute        compute buffers of a micro batch
    output         logits
    prompt cache   prompts without a slot, at most (--cache-ram)
    checkpoints    saved states of models whose caches cannot be truncated, at most
    draft          all of the above for a draft model
    projector      the file that turns images or audio into tokens
    base           the program, its libraries and its vocabulary

The prompt cache and the checkpoints grow with use; all else is allocated at the start. Options in
`args`, which are passed on unchecked, are ignored.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import MTP, FlagValue, draft_limits, spec_types
from supervisor.models.metadata import Gguf
from supervisor.models.tensors import block_bytes
from supervisor.plan import context, kv_cache
from supervisor.plan.kv_cache import Cache

_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes of one memory by purpose; see the head of estimate.py."""

    weights: int = 0
    copies: int = 0
    kv: int = 0
    compute: int = 0
    output: int = 0
    prompt_cache: int = 0
    checkpoints: int = 0
    draft: int = 0
    projector: int = 0
    base: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def at_start(self) -> int:
        """Memory allocated before the first request."""
        return self.total - self.prompt_cache - self.checkpoints


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory that an instance takes from an RPC worker."""

    taken: MemoryBreakdown
    has_bytes: int
    free_bytes: int | None  # at the last request; None if unknown
    is_main_memory: bool  # whether it is this machine's main memory


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    gguf: Gguf
    chosen: context.Chosen  # every option that the build accepts, by today's name
    engine: Engine
    cpu_flags: frozenset[str] = frozenset()  # the CPU's features by their Linux names
    draft: Gguf | None = None  # the draft model, or None
    projector_bytes: int = 0  # size of the files of its projector and adapters

    @property
    def cache(self) -> Cache:
        return context.context_layout(self.gguf, self.chosen, self.engine).cache

    def with_flags(self, flags: Mapping[str, FlagValue]) -> MemoryInputs:
        return replace(self, chosen={**self.chosen, **flags})


def with_free(memory_inputs: MemoryInputs, free: Mapping[str, int]) -> MemoryInputs:
    """Set the free bytes of this machine's devices, as far as they are in `free`."""
    engine = memory_inputs.engine
    devices = tuple(
        replace(device, free_mib=free[device.name] // _MIB) if device.name in free else device
        for device in engine.devices
    )
    return replace(memory_inputs, engine=replace(engine, devices=devices))


# Source: llama-model.cpp, load_tensors.

# Memory that --fit leaves free on each device. Source: llama-server --help, --fit-target.
_DEVICE_MARGIN_BYTES: Final = 1024 * _MIB


def devices_of(memory_inputs: MemoryInputs) -> tuple[Device, ...]:
    """Return the usable devices that have their own memory."""
    requested = memory_inputs.chosen.get("device")
    names = str(requested).split(",") if requested else None
    return tuple(
        device
        for device in memory_inputs.engine.devices
        if device.total_mib and (names is None or device.name in names)
    )


def count_offloaded(
    memory_inputs: MemoryInputs,
    layout: context.ContextLayout,
    devices: tuple[Device, ...],
    extra_bytes: int,
) -> int:
    """Return the number of layers on devices; the output counts as a layer."""
    most = memory_inputs.gguf.layers + 1
    requested = str(memory_inputs.chosen.get("gpu-layers", "auto"))
    if not devices:
        return 0
    if requested.isdecimal():
        return min(most, int(requested))
    if not is_fitted(memory_inputs, devices):
        return most
    sizes = ((device.total_mib, device.free_mib) for device in devices)
    free_mib = (total if free is None else min(total, free) for total, free in sizes)
    room = sum(max(0, mib * _MIB - _DEVICE_MARGIN_BYTES) for mib in free_mib)
    # The needed memory grows with each layer.
    return bisect.bisect_right(
        range(1, most + 1),
        room,
        key=lambda count: on_devices(memory_inputs, layout, count, extra_bytes).total,
    )


def is_fitted(memory_inputs: MemoryInputs, devices: tuple[Device, ...]) -> bool:
    """Return whether the engine chooses the number of layers by the devices' free memory."""
    requested = str(memory_inputs.chosen.get("gpu-layers", "auto"))
    is_set = requested.isdecimal() or requested == "all"
    return bool(devices) and not is_set and memory_inputs.chosen.get("fit") != "off"


def layers_left(gguf: Gguf, count: int) -> int:
    """Return the number of layers that stay in main memory, which are the first ones."""
    return gguf.layers if not count else max(0, gguf.layers + 1 - count)


def moved_weights(gguf: Gguf, count: int) -> int:
    layers = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    moved = layers * (gguf.layers - layers_left(gguf, count)) // max(1, gguf.layers)
    return moved + (gguf.output_bytes if count else 0)


def offloaded_kv_bytes(
    gguf: Gguf, layout: context.ContextLayout, count: int, chosen: context.Chosen
) -> int:
    if chosen.get("kv-offload") is False:
        return 0
    return sum(kv_cache.layer_bytes(gguf, layout.cache)[layers_left(gguf, count) :])


def on_devices(
    memory_inputs: MemoryInputs, layout: context.ContextLayout, count: int, extra_bytes: int
) -> MemoryBreakdown:
    """Return the memory of all devices together; `extra_bytes` are not for layers."""
    gguf = memory_inputs.gguf
    if not count:
        return MemoryBreakdown()
    return MemoryBreakdown(
        weights=moved_weights(gguf, count) + (0 if gguf.output_bytes else gguf.embedding_bytes),
        kv=offloaded_kv_bytes(gguf, layout, count, memory_inputs.chosen),
        compute=context.compute_bytes(gguf, layout),
        draft=extra_bytes - memory_inputs.projector_bytes,
        projector=memory_inputs.projector_bytes,
    )


def split_between(
    take: MemoryBreakdown, devices: tuple[Device, ...], chosen: context.Chosen
) -> Mapping[str, MemoryBreakdown]:
    """Split memory by `tensor-split` or by device memory; each has a full compute buffer."""
    if not take.total:
        return {}
    weights = _weights(devices, str(chosen.get("tensor-split", "")))
    whole = sum(weights)

    def share(weight: float) -> MemoryBreakdown:
        parts = (int(getattr(take, field.name) * weight // whole) for field in fields(take))
        return replace(MemoryBreakdown(*parts), compute=take.compute)

    pairs = zip(devices, weights, strict=True)
    return {device.name: share(weight) for device, weight in pairs if weight}


def _weights(devices: tuple[Device, ...], split: str) -> Sequence[float]:
    """Return the shares of devices; an invalid `tensor-split` is ignored."""
    try:
        given = [float(weight) for weight in split.split(",")]
    except ValueError:
        given = []
    is_valid = len(given) == len(devices) and min(given) >= 0 and 0 < sum(given) < math.inf
    return given if is_valid else [device.total_mib for device in devices]


__all__ = ["Estimate", "MemoryBreakdown", "MemoryInputs", "estimate"]

# Resident memory of build 10434 with its libraries and a vocabulary of 416 tokens, and of each
# further token: measured with SmolLM2 (49 152 tokens and merges) and Gemma-3 (262 144, no merges).
_BASE_BYTES: Final = 33 * _MIB
_BYTES_PER_TOKEN: Final = 160
_BYTES_PER_TOKEN_MERGED: Final = 270

# Types that the CPU backend repacks, by the processor feature; AMX has priority.
# Source: ggml-cpu/repack.cpp, ggml_repack_get_optimal_repack_type; ggml-cpu/amx/common.h,
# qtype_has_amx_kernels.
_REPACKED: Final[Mapping[str, frozenset[str]]] = {
    "avx2": frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"}),
    "avx512f": frozenset({"Q2_K"}),
    "asimddp": frozenset({"Q4_0", "Q4_K", "IQ4_NL"}),
}
# Bytes that AMX adds to each block. Source: ggml-cpu/amx/mmq.cpp, get_row_size; build 10434 logs
# the same.
_AMX_EXTRA_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F16", "Q4_0", "Q4_1", "Q6_K"), 0),
    **dict.fromkeys(("Q8_0", "Q4_K", "Q5_K"), 4),
    "IQ4_XS": 2,
}


@dataclass(frozen=True, slots=True)
class Estimate:
    host: MemoryBreakdown
    devices: Mapping[str, MemoryBreakdown]  # by device name; empty if nothing is offloaded
    mapped_bytes: int  # main memory shared by all instances that map the same file
    layers_offloaded: int  # layers on devices; the output counts as a layer
    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)  # by name
    is_fitted: bool = False  # whether the engine offloads fewer layers if less memory is free

    @property
    def own_bytes(self) -> int:
        """Main memory that no other instance shares."""
        return self.host.total - self.mapped_bytes + self.local_workers_bytes

    @property
    def own_at_start_bytes(self) -> int:
        """The part of `own_bytes` that is allocated before the first request."""
        return self.host.at_start - self.mapped_bytes + self.local_workers_bytes

    @property
    def local_workers_bytes(self) -> int:
        """Main memory that workers on this machine take for it."""
        return sum(
            worker.taken.at_start for worker in self.workers.values() if worker.is_main_memory
        )


def estimate(memory_inputs: MemoryInputs) -> Estimate:
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    layout = context.context_layout(gguf, chosen, memory_inputs.engine)
    devices = devices_of(memory_inputs)
    draft = _draft_bytes(memory_inputs, layout)
    count = count_offloaded(memory_inputs, layout, devices, draft + memory_inputs.projector_bytes)
    on_host = count <= gguf.layers
    load_mode = str(chosen.get("load-mode", "mmap"))
    is_mapped = chosen.get("mmap") is not False and ("mmap" in load_mode or load_mode == "auto")
    extra_bytes = (draft + memory_inputs.projector_bytes) if count else 0
    host = MemoryBreakdown(
        weights=gguf.tensor_bytes - moved_weights(gguf, count),
        copies=_copies(gguf, memory_inputs) * layers_left(gguf, count) // max(1, gguf.layers),
        kv=_kv_bytes(gguf, layout) - offloaded_kv_bytes(gguf, layout, count, chosen),
        compute=context.compute_bytes(gguf, layout)
        if on_host
        else context.input_bytes(gguf, layout),
        output=context.output_bytes(gguf, layout),
        prompt_cache=layout.prompt_cache_bytes,
        checkpoints=layout.checkpoints
        * layout.cache.slots
        * kv_cache.checkpoint_bytes(gguf, layout.cache),
        draft=0 if extra_bytes else draft,
        projector=0 if extra_bytes else memory_inputs.projector_bytes,
        base=_BASE_BYTES
        + gguf.vocab_size
        * (_BYTES_PER_TOKEN_MERGED if gguf.tokenizer == "gpt2" else _BYTES_PER_TOKEN),
    )
    on_all = on_devices(memory_inputs, layout, count, extra_bytes)
    taken = split_between(on_all, devices, chosen)
    here = {device.name for device in devices if device.worker is None}
    return Estimate(
        host=host,
        devices={name: memory for name, memory in taken.items() if name in here},
        mapped_bytes=host.weights if is_mapped else 0,
        layers_offloaded=count,
        workers={
            name: _worker_memory([device for device in devices if device.worker == name], taken)
            for name in dict.fromkeys(device.worker for device in devices if device.name in taken)
            if name
        },
        is_fitted=is_fitted(memory_inputs, devices),
    )


def _worker_memory(devices: list[Device], taken: Mapping[str, MemoryBreakdown]) -> WorkerMemory:
    parts = [taken[device.name] for device in devices if device.name in taken]
    free_mib = [device.free_mib for device in devices if device.free_mib is not None]
    sums = (sum(getattr(part, field.name) for part in parts) for field in fields(parts[0]))
    return WorkerMemory(
        taken=MemoryBreakdown(*sums),
        has_bytes=sum(device.total_mib for device in devices) * _MIB,
        free_bytes=sum(free_mib) * _MIB if len(free_mib) == len(devices) else None,
        is_main_memory=any(device.is_main_memory for device in devices),
    )


def _kv_bytes(gguf: Gguf, layout: context.ContextLayout) -> int:
    return (
        kv_cache.cache_bytes(gguf, layout.cache) + kv_cache.state_bytes(gguf) * layout.cache.slots
    )


def _draft_bytes(memory_inputs: MemoryInputs, layout: context.ContextLayout) -> int:
    """Return the memory for drafting; a draft model or draft layers have a second context."""
    own, draft = context.draft_layout(layout, memory_inputs.chosen), memory_inputs.draft
    if draft is None:
        return _draft_layers_bytes(memory_inputs, own)
    buffers = context.compute_bytes(draft, own) + context.output_bytes(draft, own)
    weights = draft.tensor_bytes + _copies(draft, memory_inputs)
    return weights + _kv_bytes(draft, own) + buffers


def _draft_layers_bytes(memory_inputs: MemoryInputs, own: context.ContextLayout) -> int:
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    if not gguf.draft_layers or MTP not in spec_types(chosen):
        return 0
    # The recurrent state before each drafted token is kept for a rollback.
    drafted = max(int(chosen.get(key, default)) for key, default in draft_limits(chosen))
    states = kv_cache.state_bytes(gguf) * own.cache.slots * drafted
    count, heads = gguf.draft_layers, max(gguf.kv_heads, default=0)
    layers = replace(gguf, kv_heads=(heads,) * count, sliding=(False,) * count)
    buffers = context.compute_bytes(gguf, own) + context.output_bytes(gguf, own)
    return kv_cache.cache_bytes(layers, own.cache) + states + buffers


def _copies(gguf: Gguf, memory_inputs: MemoryInputs) -> int:
    if memory_inputs.chosen.get("repack") is False:
        return 0
    flags = memory_inputs.cpu_flags
    kinds = frozenset[str]().union(*(_REPACKED[flag] for flag in flags & _REPACKED.keys()))
    # The portable CPU library has no AMX.
    has_amx = "amx_int8" in flags and not memory_inputs.engine.library_dirs
    total = 0
    for kind, rows, size in gguf.matrix_bytes:
        if has_amx and kind in _AMX_EXTRA_BYTES and rows >= 32:
            total += size + size // block_bytes(kind) * _AMX_EXTRA_BYTES[kind]
        elif kind in kinds and rows >= 8:
            total += size
    return total
