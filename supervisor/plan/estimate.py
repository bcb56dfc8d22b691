"""Estimates the main memory and device memory of an instance, layer by layer. Pure.

`placement` says which weights are on devices. The table of embeddings is copied there if it serves
as output. The estimate follows the engine's source. It was compared with the log of build 10434 on
Mesa's software device, for dense models and models with experts: weights and cache agree to the
last digit, and the total of models of a GiB to 2 %. With few layers on the device, its compute
buffer is larger than estimated: for SmolLM2 with 65 536 tokens, 117 MiB instead of 78, of 1 GiB in
all.

    weights        the file's tensors; if mapped, shared by all processes that map it
    copies         matrices that the CPU backend repacks; in the file they count only if locked
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

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import MTP, FlagValue, draft_limits, spec_types
from supervisor.models.metadata import Gguf
from supervisor.models.tensors import block_bytes
from supervisor.plan import context, kv_cache, placement
from supervisor.plan.kv_cache import Cache
from supervisor.plan.placement import Placement

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
_DEVICE_MARGIN_MIB: Final = 1024


def devices_of(memory_inputs: MemoryInputs) -> tuple[Device, ...]:
    """Return the usable devices that have their own memory."""
    requested = memory_inputs.chosen.get("device")
    names = str(requested).split(",") if requested else None
    return tuple(
        device
        for device in memory_inputs.engine.devices
        if device.total_mib and (names is None or device.name in names)
    )


def place(
    memory_inputs: MemoryInputs,
    layout: context.ContextLayout,
    devices: tuple[Device, ...],
    extra_bytes: int,
) -> Placement:
    """Return where the weights go; `extra_bytes` of the devices' memory are for others."""
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    requested = str(chosen.get("gpu-layers", "auto"))
    if not devices:
        return Placement(0)
    if requested.isdecimal():
        return Placement(min(gguf.layers + 1, int(requested)), placement.overrides(chosen))
    if not is_fitted(memory_inputs, devices):
        return Placement(gguf.layers + 1, placement.overrides(chosen))
    sizes = ((device.total_mib, device.free_mib) for device in devices)
    free_mib = (total if free is None else min(total, free) for total, free in sizes)
    room = sum(
        max(0, (free - margin) * _MIB)
        for free, margin in zip(free_mib, _margins_mib(chosen, len(devices)), strict=True)
    )

    def fits(tried: Placement) -> bool:
        return on_devices(memory_inputs, layout, tried, devices, extra_bytes).total <= room

    return placement.fitted(gguf, fits)


def is_fitted(memory_inputs: MemoryInputs, devices: tuple[Device, ...]) -> bool:
    """Return whether the engine chooses the placement by the devices' free memory.

    Source: fit.cpp, common_params_fit_impl, which changes no option that the user set.
    """
    chosen = memory_inputs.chosen
    requested = str(chosen.get("gpu-layers", "auto"))
    is_set = requested.isdecimal() or requested == "all" or placement.overrides(chosen)
    is_split = len(devices) > 1 and "tensor-split" in chosen
    return bool(devices) and not (is_set or is_split) and chosen.get("fit") != "off"


def _margins_mib(chosen: context.Chosen, devices: int) -> list[int]:
    """Return the memory that stays free on each device."""
    words = str(chosen.get("fit-target", "")).split(",")
    given = [int(word) for word in words if word.strip().isdecimal()]
    if len(given) == 1:
        return given * devices
    return (given + [_DEVICE_MARGIN_MIB] * devices)[:devices]


def offloaded_kv(
    gguf: Gguf, layout: context.ContextLayout, found: Placement, chosen: context.Chosen
) -> Sequence[int]:
    """Return the bytes of each layer's KV cache that are on its device."""
    if chosen.get("kv-offload") is False:
        return (0,) * gguf.layers
    first = placement.first_layer(gguf, found)
    return (*(0,) * first, *kv_cache.layer_bytes(gguf, layout.cache)[first:])


def on_devices(
    memory_inputs: MemoryInputs,
    layout: context.ContextLayout,
    found: Placement,
    devices: tuple[Device, ...],
    extra_bytes: int,
) -> MemoryBreakdown:
    """Return the memory of all devices together; `extra_bytes` are not for layers."""
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    placed = placement.placed_weights(gguf, found, _names(devices))
    computes_there = chosen.get("op-offload") is not False
    # Without layers too a device computes large batches; if none fit, `--fit` leaves it alone.
    is_chosen = bool(devices) and str(chosen.get("gpu-layers")).isdecimal()
    if not placed.total and not (is_chosen and computes_there):
        return MemoryBreakdown()
    copied = placed.largest_kept if computes_there else 0
    return MemoryBreakdown(
        weights=placed.total + _output_copy(gguf, found),
        kv=sum(offloaded_kv(gguf, layout, found, chosen)),
        compute=context.device_compute_bytes(gguf, layout, copied, placed.up_and_gate),
        draft=extra_bytes - memory_inputs.projector_bytes,
        projector=memory_inputs.projector_bytes,
    )


def _output_copy(gguf: Gguf, found: Placement) -> int:
    """Return the bytes of the embeddings' copy that serves as output on a device."""
    return 0 if gguf.output_bytes or not found.layers else gguf.embedding_bytes


def _names(devices: tuple[Device, ...]) -> tuple[str, ...]:
    return tuple(device.name for device in devices)


def split_between(
    memory_inputs: MemoryInputs,
    layout: context.ContextLayout,
    found: Placement,
    devices: tuple[Device, ...],
    take: MemoryBreakdown,
) -> Mapping[str, MemoryBreakdown]:
    """Split memory by `tensor-split` or by device memory; each has a full compute buffer."""
    if not take.total:
        return {}
    gguf, chosen = memory_inputs.gguf, memory_inputs.chosen
    shares, owners = _shares(devices, chosen), _owners(gguf, found, devices, chosen)
    placed = placement.placed_weights(gguf, found, _names(devices))
    kv, first = offloaded_kv(gguf, layout, found, chosen), placement.first_layer(gguf, found)
    weights, cache = [placed.named.get(name, 0) for name in _names(devices)], [0] * len(devices)
    for layer, owner in enumerate(owners[:-1], first):
        weights[owner] += placed.by_layer[layer]
        cache[owner] += kv[layer]
    for owner in owners[-1:]:
        weights[owner] += placed.output + _output_copy(gguf, found)
    return {
        device.name: replace(
            take,
            weights=weights[at],
            kv=cache[at],
            draft=int(take.draft * share // sum(shares)),
            projector=int(take.projector * share // sum(shares)),
        )
        for at, (device, share) in enumerate(zip(devices, shares, strict=True))
        # Without weights there, the first device computes the large batches.
        # Source: ggml-backend.cpp, ggml_backend_sched_backend_id_from_cur.
        if (share if placed.total else not at) or weights[at]
    }


def _owners(
    gguf: Gguf, found: Placement, devices: tuple[Device, ...], chosen: context.Chosen
) -> tuple[int, ...]:
    if not found.layers:
        return ()
    return placement.layer_owners(_shares(devices, chosen), gguf.layers, found.layers)


def _shares(devices: tuple[Device, ...], chosen: context.Chosen) -> Sequence[float]:
    """Return the shares of devices; an invalid `tensor-split` is ignored."""
    try:
        given = [float(weight) for weight in str(chosen.get("tensor-split", "")).split(",")]
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
    placement: Placement  # of the weights that are on devices
    device_layers: Mapping[str, int]  # by device name; the output counts as a layer
    workers: Mapping[str, WorkerMemory] = field(default_factory=dict)  # by name
    is_fitted: bool = False  # whether the engine offloads fewer layers if less memory is free

    @property
    def layers_offloaded(self) -> int:
        """The layers on devices; the output counts as a layer."""
        return self.placement.layers

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
    found = place(memory_inputs, layout, devices, draft + memory_inputs.projector_bytes)
    extra_bytes = (draft + memory_inputs.projector_bytes) if found.layers else 0
    on_all = on_devices(memory_inputs, layout, found, devices, extra_bytes)
    freed, copies = (0, 0) if on_all.total else _repacked(gguf, memory_inputs)
    host_weights = gguf.tensor_bytes - on_all.weights + _output_copy(gguf, found) - freed
    # With a device, the host's matrices stay as they are, and large batches are computed there.
    # Source: llama-model.cpp, make_cpu_buft_list.
    computes = not on_all.total or chosen.get("op-offload") is False
    host = MemoryBreakdown(
        weights=host_weights,
        copies=copies,
        kv=_kv_bytes(gguf, layout) - on_all.kv,
        compute=context.compute_bytes(gguf, layout)
        if computes and found.layers <= gguf.layers
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
    taken = split_between(memory_inputs, layout, found, devices, on_all)
    here = {device.name for device in devices if device.worker is None}
    return Estimate(
        host=host,
        devices={name: memory for name, memory in taken.items() if name in here},
        mapped_bytes=host.weights if _is_mapped(chosen) else 0,
        placement=found,
        device_layers=Counter(devices[at].name for at in _owners(gguf, found, devices, chosen)),
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
    freed, copies = _repacked(draft, memory_inputs)
    weights = draft.tensor_bytes - freed + copies
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


def repacked_bytes(gguf: Gguf, cpu_flags: frozenset[str], engine: Engine) -> tuple[int, int]:
    """Return the size of the matrices that the CPU backend repacks, in the file and in memory."""
    kinds = frozenset[str]().union(*(_REPACKED[flag] for flag in cpu_flags & _REPACKED.keys()))
    # The portable CPU library has no AMX.
    has_amx = "amx_int8" in cpu_flags and not engine.library_dirs
    in_file = extra = 0
    for kind, rows, size in gguf.matrix_bytes:
        if has_amx and kind in _AMX_EXTRA_BYTES and rows >= 32:
            in_file += size
            extra += size // block_bytes(kind) * _AMX_EXTRA_BYTES[kind]
        elif kind in kinds and rows >= 8:
            in_file += size
    return in_file, in_file + extra


def _repacked(gguf: Gguf, memory_inputs: MemoryInputs) -> tuple[int, int]:
    """Return the bytes of the file that repacking frees, and those of the copies.

    The engine reads a repacked tensor's part of the file once, so the system may drop its pages
    unless they are locked. Build 10434 with 960 MiB of Q4_0 was as fast within 1 400 MiB as without
    a limit; with `--load-mode mmap+mlock` the kernel killed it.
    """
    chosen = memory_inputs.chosen
    if chosen.get("repack") is False:
        return 0, 0
    in_file, copies = repacked_bytes(gguf, memory_inputs.cpu_flags, memory_inputs.engine)
    is_locked = "mlock" in str(chosen.get("load-mode", "")) or chosen.get("mlock") is True
    return 0 if is_locked and _is_mapped(chosen) else in_file, copies


def _is_mapped(chosen: context.Chosen) -> bool:
    load_mode = str(chosen.get("load-mode", "mmap"))
    return chosen.get("mmap") is not False and ("mmap" in load_mode or load_mode == "auto")
