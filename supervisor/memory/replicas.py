"""How many instances serve a model with `replicas = "auto"`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from supervisor.host.machine import Machine
from supervisor.memory.estimate import MemoryInputs, estimate
from supervisor.memory.fit import MemoryCapacity, misfit_reason

# With devices: one per device, if there are several and each holds the whole model; else one, which
# the engine spreads over them. On a CPU: one for every eight cores of the model's share, as memory
# allows, and four at most. Slots of one instance decode in one batch and read the weights once, so
# another instance pays only where one can no longer use all cores.

_CORES: Final = 8
_MOST: Final = 4


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many instances serve a model."""

    count: int
    reason: str  # a clause
    devices: tuple[str, ...] = ()  # the device of each instance; empty if left to the engine


def decide(
    memory_inputs: MemoryInputs, machine: Machine, has: MemoryCapacity, models: int
) -> Replicas:
    """Decide the number of instances."""
    if not has.devices or "device" in memory_inputs.chosen:
        return _on_cores(memory_inputs, machine, has, max(1, models))
    if len(has.devices) == 1:
        return Replicas(1, "the machine has one device")
    if not all(_is_held_by(memory_inputs, has, name) for name in has.devices):
        return Replicas(1, "no device of this machine can hold the whole model")
    count = min(len(has.devices), _by_memory(memory_inputs, has, max(1, models)))
    reason = f"one per device; each of {len(has.devices)} devices can hold the whole model"
    return Replicas(count, reason, tuple(has.devices)[:count])


def _on_cores(
    memory_inputs: MemoryInputs, machine: Machine, has: MemoryCapacity, models: int
) -> Replicas:
    by_cores = machine.physical_cores // models // _CORES
    by_memory = _by_memory(memory_inputs, has, models)
    count = max(1, min(by_cores, by_memory, _MOST))
    cores = f"{machine.physical_cores} physical cores for {models} models, {_CORES} per instance"
    return Replicas(count, cores if by_cores <= by_memory else f"{cores}, limited by memory")


def _by_memory(memory_inputs: MemoryInputs, has: MemoryCapacity, models: int) -> int:
    """Instances that fit into the model's share of main memory; weights count once."""
    found = estimate(memory_inputs)
    room = has.host // models - found.mapped_bytes
    return max(1, room // max(1, found.own_bytes))


def _is_held_by(memory_inputs: MemoryInputs, has: MemoryCapacity, device: str) -> bool:
    """Whether one device holds all layers."""
    alone = estimate(replace(memory_inputs, chosen={**memory_inputs.chosen, "device": device}))
    return alone.layers_offloaded > memory_inputs.gguf.layers and misfit_reason(alone, has) is None
