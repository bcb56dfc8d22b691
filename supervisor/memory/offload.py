"""Which layers go to devices, and their memory there. Pure.

The output is moved first, then layers from the last to the first; the table of embeddings stays,
and is copied if it serves as output. Follows the source, and was compared with the log of build
10434 on Mesa's software device: weights and cache agree to the last digit, and the total to 1 %
where all layers are there. A device that has some of the layers needs a larger compute buffer
than estimated, in SmolLM2 with 65 536 tokens 117 MiB and not 78, of 1 GiB in all.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from supervisor.engines.discover import Device
from supervisor.gguf.metadata import Gguf
from supervisor.memory import kv_cache
from supervisor.memory.compute import compute_bytes
from supervisor.memory.context import Chosen, ContextLayout
from supervisor.memory.inputs import MemoryBreakdown, MemoryInputs

# Source: llama-model.cpp, load_tensors.

_MIB: Final = 1024**2
# Memory that --fit leaves free on each device. Source: llama-server --help, --fit-target.
_DEVICE_MARGIN_BYTES: Final = 1024 * _MIB


def devices_of(memory_inputs: MemoryInputs) -> tuple[Device, ...]:
    """The usable devices with memory of their own."""
    requested = memory_inputs.chosen.get("device")
    names = (
        str(requested).split(",")
        if requested
        else [one.name for one in memory_inputs.engine.devices]
    )
    return tuple(one for one in memory_inputs.engine.devices if one.total_mib and one.name in names)


def count_offloaded(
    memory_inputs: MemoryInputs,
    layout: ContextLayout,
    devices: tuple[Device, ...],
    extra_bytes: int,
) -> int:
    """The number of layers on devices; the output counts as one."""
    most = memory_inputs.gguf.layers + 1
    requested = str(memory_inputs.chosen.get("gpu-layers", "auto"))
    if not devices:
        return 0
    if requested.isdecimal():
        return min(most, int(requested))
    if not is_fitted(memory_inputs, devices):
        return most
    room = sum(max(0, _free_mib(one) * _MIB - _DEVICE_MARGIN_BYTES) for one in devices)
    # Their memory grows with each layer.
    return bisect.bisect_right(
        range(1, most + 1),
        room,
        key=lambda count: on_devices(memory_inputs, layout, count, extra_bytes).total,
    )


def is_fitted(memory_inputs: MemoryInputs, devices: tuple[Device, ...]) -> bool:
    """Whether the engine chooses the number of layers by what is free of the devices."""
    requested = str(memory_inputs.chosen.get("gpu-layers", "auto"))
    is_set = requested.isdecimal() or requested == "all"
    return bool(devices) and not is_set and memory_inputs.chosen.get("fit") != "off"


def _free_mib(device: Device) -> int:
    known = device.total_mib if device.free_mib is None else device.free_mib
    return min(device.total_mib, known)


def layers_left(gguf: Gguf, count: int) -> int:
    """The number of layers in main memory, the first ones."""
    return gguf.layers if not count else max(0, gguf.layers + 1 - count)


def moved_weights(gguf: Gguf, count: int) -> int:
    """Bytes of weights that leave main memory."""
    layers = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    moved = layers * (gguf.layers - layers_left(gguf, count)) // max(1, gguf.layers)
    return moved + (gguf.output_bytes if count else 0)


def moved_kv(gguf: Gguf, layout: ContextLayout, count: int, chosen: Chosen) -> int:
    """Bytes of KV cache that leave main memory."""
    if chosen.get("kv-offload") is False:
        return 0
    return sum(kv_cache.layer_bytes(gguf, layout.cache)[layers_left(gguf, count) :])


def on_devices(
    memory_inputs: MemoryInputs, layout: ContextLayout, count: int, extra_bytes: int
) -> MemoryBreakdown:
    """Memory of all devices together, `extra_bytes` bytes of it besides the layers."""
    gguf = memory_inputs.gguf
    if not count:
        return MemoryBreakdown()
    return MemoryBreakdown(
        weights=moved_weights(gguf, count) + (0 if gguf.output_bytes else gguf.embedding_bytes),
        kv=moved_kv(gguf, layout, count, memory_inputs.chosen),
        compute=compute_bytes(gguf, layout),
        draft=extra_bytes - memory_inputs.projector_bytes,
        projector=memory_inputs.projector_bytes,
    )


def split_between(
    take: MemoryBreakdown, devices: tuple[Device, ...], chosen: Chosen
) -> Mapping[str, MemoryBreakdown]:
    """Split by `tensor-split`, or by the devices' memory; each has a whole compute buffer."""
    if not take.total:
        return {}
    weights = _weights(devices, str(chosen.get("tensor-split", "")))

    whole = sum(weights)

    def share(weight: float) -> MemoryBreakdown:
        parts = {
            field.name: int(getattr(take, field.name) * weight // whole) for field in fields(take)
        }
        return MemoryBreakdown(**parts | {"compute": take.compute})

    return {
        device.name: share(weight)
        for device, weight in zip(devices, weights, strict=True)
        if weight
    }


def _weights(devices: tuple[Device, ...], split: str) -> Sequence[float]:
    """The shares of devices; those of an option that no engine would accept do not count."""
    try:
        given = [float(one) for one in split.split(",")]
    except ValueError:
        given = []
    is_valid = len(given) == len(devices) and min(given) >= 0 and 0 < sum(given) < math.inf
    return given if is_valid else [one.total_mib for one in devices]
