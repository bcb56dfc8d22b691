"""Reduces a model's settings when memory runs short, and decides how many instances fit. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.builds.help import FlagValue
from supervisor.plan import fit
from supervisor.plan.estimate import Estimate, MemoryInputs, estimate
from supervisor.system.machine import Machine


def shortage(found: Estimate, free: Mapping[str, int]) -> str | None:
    """Return why device memory is short now, or None; `free` has the known bytes by device."""
    return fit.first_lack(
        *((name, taken, free.get(name)) for name, taken in found.devices.items()),
        *((f"worker {name}", own.taken, own.free_bytes) for name, own in found.workers.items()),
        what=" free",
    )


Kind = Literal["context", "cache", "layers"]


def next_reduction(
    memory_inputs: MemoryInputs,
    tried: Collection[Kind],
    own: frozenset[str],
    is_short: Callable[[Estimate], bool],
) -> tuple[Kind, Mapping[str, FlagValue]] | None:
    """Return the first untried kind and options that replace planned ones, or None.

    It is the mildest change of its kind with which memory suffices, or else the strongest.

    Args:
        tried: The kinds that were tried; each is tried once.
        own: Options that the user set for the model; they do not change.
        is_short: Returns whether memory is known not to suffice.
    """
    for kind, candidates in _KINDS.items():
        changes = [] if kind in tried else [*candidates(memory_inputs)]
        if changes and own.isdisjoint(changes[0]):
            estimates = ((flags, estimate(memory_inputs.with_flags(flags))) for flags in changes)
            sufficient = (flags for flags, found in estimates if not is_short(found))
            return kind, next(sufficient, changes[-1])
    return None


def _fewer_layers(memory_inputs: MemoryInputs) -> Iterator[Mapping[str, FlagValue]]:
    """Yield half of the layers on devices, or fewer; layers on workers stay there."""
    found = estimate(memory_inputs)
    if not found.workers and found.layers_offloaded:
        for count in range(found.layers_offloaded // 2, -1, -1):
            yield {"gpu-layers": count}


# In the order in which they are tried: the mildest for users first.
_KINDS: Final[Mapping[Kind, Callable[[MemoryInputs], Iterator[Mapping[str, FlagValue]]]]] = {
    "context": fit.shorter_contexts,
    "cache": fit.smaller_cache,
    "layers": _fewer_layers,
}


# With devices: an instance per device if there are several and each holds the whole model,
# otherwise a single instance, which the engine spreads over them. On a CPU: an instance for every
# eight cores of the model's share, at most four, as memory allows. The slots of an instance decode
# in a single batch and read the weights once, so another instance pays only if a single one can no
# longer use all cores.

_CORES: Final = 8
_MOST: Final = 4


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many instances serve a model."""

    count: int
    reason: str  # a clause
    devices: tuple[str, ...] = ()  # the device of each instance; empty if left to the engine


def decide(
    memory_inputs: MemoryInputs, machine: Machine, has: fit.MemoryCapacity, models: int
) -> Replicas:
    """Decide the number of instances of a model, which shares the machine with other models."""
    models = max(1, models)
    if not has.devices or "device" in memory_inputs.chosen:
        by_cores = machine.physical_cores // models // _CORES
        by_memory = _by_memory(memory_inputs, has, models)
        count = max(1, min(by_cores, by_memory, _MOST))
        cores = f"{machine.physical_cores} physical cores for {models} models, "
        cores += f"{_CORES} per instance"
        return Replicas(count, cores if by_cores <= by_memory else f"{cores}, limited by memory")
    if len(has.devices) == 1:
        return Replicas(1, "the machine has one device")
    if not all(_is_held_by(memory_inputs, has, name) for name in has.devices):
        return Replicas(1, "no device of this machine can hold the whole model")
    count = min(len(has.devices), _by_memory(memory_inputs, has, models))
    reason = f"one per device; each of {len(has.devices)} devices can hold the whole model"
    return Replicas(count, reason, tuple(has.devices)[:count])


def _by_memory(memory_inputs: MemoryInputs, has: fit.MemoryCapacity, models: int) -> int:
    """Return how many instances fit into the model's share of main memory; they share weights."""
    found = estimate(memory_inputs)
    room = has.host // models - found.mapped_bytes
    return max(1, room // max(1, found.own_bytes))


def _is_held_by(memory_inputs: MemoryInputs, has: fit.MemoryCapacity, device: str) -> bool:
    alone = estimate(memory_inputs.with_flags({"device": device}))
    return (
        alone.layers_offloaded > memory_inputs.gguf.layers and fit.misfit_reason(alone, has) is None
    )
