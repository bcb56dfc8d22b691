"""Which layers go to devices, and what they take there. Pure.

The output is moved first, then layers from the last to the first; the table of embeddings stays,
and is copied where it serves as output. As the source has it, not measured.

Source: llama-model.cpp, load_tensors.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from supervisor.profile import kv
from supervisor.profile.burden import Burden, Take
from supervisor.profile.compute import compute_bytes
from supervisor.profile.engine import Device
from supervisor.profile.gguf import Gguf
from supervisor.profile.layout import Chosen, Layout

_MIB: Final = 1024**2
# What --fit leaves free on each device. Source: llama-server --help, --fit-target.
_DEVICE_MARGIN_BYTES: Final = 1024 * _MIB


def devices_of(burden: Burden) -> tuple[Device, ...]:
    """Return the devices with memory of their own that may be used."""
    asked = burden.chosen.get("device")
    names = str(asked).split(",") if asked else [one.name for one in burden.engine.devices]
    return tuple(one for one in burden.engine.devices if one.total_mib and one.name in names)


def offloaded(burden: Burden, numbers: Layout, devices: tuple[Device, ...], aside: int) -> int:
    """Return how many layers go to devices, the output counted as one.

    Args:
        burden: What is placed.
        numbers: What its options come to.
        devices: Where layers may go.
        aside: What goes there besides the layers, in bytes.
    """
    most = burden.gguf.layers + 1
    asked = str(burden.chosen.get("gpu-layers", "auto"))
    if not devices:
        return 0
    if asked.isdecimal():
        return min(most, int(asked))
    if asked == "all" or burden.chosen.get("fit") == "off":
        return most
    room = sum(max(0, one.total_mib * _MIB - _DEVICE_MARGIN_BYTES) for one in devices)
    # What they take grows with each layer.
    return bisect.bisect_right(
        range(1, most + 1),
        room,
        key=lambda count: on_devices(burden, numbers, count, aside).total,
    )


def layers_left(gguf: Gguf, count: int) -> int:
    """Return how many layers stay in main memory: the first."""
    return gguf.layers if not count else max(0, gguf.layers + 1 - count)


def moved_weights(gguf: Gguf, count: int) -> int:
    """Return the weights that main memory is spared of."""
    layers = gguf.tensor_bytes - gguf.embedding_bytes - gguf.output_bytes
    moved = layers * (gguf.layers - layers_left(gguf, count)) // max(1, gguf.layers)
    return moved + (gguf.output_bytes if count else 0)


def moved_kv(gguf: Gguf, numbers: Layout, count: int, chosen: Chosen) -> int:
    """Return the cache that main memory is spared of."""
    if chosen.get("kv-offload") is False:
        return 0
    return sum(kv.layer_bytes(gguf, numbers.cache)[layers_left(gguf, count) :])


def on_devices(burden: Burden, numbers: Layout, count: int, aside: int) -> Take:
    """Return what all devices together take; `aside` is what goes there besides the layers."""
    gguf = burden.gguf
    if not count:
        return Take()
    return Take(
        weights=moved_weights(gguf, count) + (0 if gguf.output_bytes else gguf.embedding_bytes),
        kv=moved_kv(gguf, numbers, count, burden.chosen),
        compute=compute_bytes(gguf, numbers),
        draft=aside - burden.projector_bytes,
        projector=burden.projector_bytes,
    )


def shared_out(take: Take, devices: tuple[Device, ...]) -> Mapping[str, Take]:
    """Return each device's share, by its memory; each computes in a buffer of its own."""
    if not take.total:
        return {}
    whole = sum(one.total_mib for one in devices)

    def share(device: Device) -> Take:
        parts = {
            field.name: getattr(take, field.name) * device.total_mib // whole
            for field in fields(take)
        }
        return Take(**parts | {"compute": take.compute})

    return {device.name: share(device) for device in devices}
