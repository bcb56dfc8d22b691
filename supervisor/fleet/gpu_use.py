"""What of a model is on GPUs, by the memory plans of its instances. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from proxy.models import GpuUse
from supervisor.memory.estimate import Estimate

# A worker on another machine is a device for the engine, whatever it computes with.
_REMOTE: Final = "RPC"


def gpu_use(estimates: Iterable[Estimate]) -> GpuUse:
    """Return what instances with these estimates have on GPUs."""
    uses = [_use(one) for one in estimates]
    return GpuUse(
        layers=max((use.layers for use in uses), default=0),
        memory_bytes=sum(use.memory_bytes for use in uses),
        devices=tuple(dict.fromkeys(name for use in uses for name in use.devices)),
    )


def _use(estimate: Estimate) -> GpuUse:
    gpus = {
        name: memory
        for name, memory in estimate.devices.items()
        if not name.startswith(_REMOTE) and memory.total
    }
    weights = sum(memory.weights for memory in estimate.devices.values())
    ours = sum(memory.weights for memory in gpus.values())
    return GpuUse(
        layers=round(estimate.layers_offloaded * ours / weights) if weights else 0,
        memory_bytes=sum(memory.total for memory in gpus.values()),
        devices=tuple(gpus),
    )
