"""What a model gives up after its engine ran out of memory while it loaded. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from supervisor.engines.help import FlagValue
from supervisor.memory.estimate import Estimate, estimate
from supervisor.memory.fit import shorter, smaller_cache
from supervisor.memory.inputs import MemoryInputs

Kind = Literal["context", "cache", "layers"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """Options that replace planned ones."""

    kind: Kind
    flags: Mapping[str, FlagValue]
    before: Mapping[str, FlagValue | None]


def next_reduction(
    memory_inputs: MemoryInputs,
    tried: Collection[Kind],
    own: frozenset[str],
    is_short: Callable[[Estimate], bool],
) -> Reduction | None:
    """Return the first kind of reduction that is left, or None.

    Args:
        memory_inputs: Of the start that failed.
        tried: The kinds that were tried; each is tried once.
        own: Options that the user set for the model; they do not change.
        is_short: Whether memory is known not to suffice. Of one kind, the least change with which
            it suffices is taken, else the largest.
    """
    for kind, candidates in _KINDS.items():
        changes = [] if kind in tried else [*candidates(memory_inputs)]
        if changes and own.isdisjoint(changes[0]):
            return _reduction(kind, memory_inputs, _least(memory_inputs, changes, is_short))
    return None


def _reduction(
    kind: Kind, memory_inputs: MemoryInputs, flags: Mapping[str, FlagValue]
) -> Reduction:
    return Reduction(kind, flags, {key: memory_inputs.chosen.get(key) for key in flags})


def _least(
    memory_inputs: MemoryInputs,
    changes: list[Mapping[str, FlagValue]],
    is_short: Callable[[Estimate], bool],
) -> Mapping[str, FlagValue]:
    for flags in changes:
        if not is_short(estimate(reduced(memory_inputs, flags))):
            return flags
    return changes[-1]


def reduced(memory_inputs: MemoryInputs, flags: Mapping[str, FlagValue]) -> MemoryInputs:
    return replace(memory_inputs, chosen={**memory_inputs.chosen, **flags})


def _shorter(memory_inputs: MemoryInputs) -> Iterator[Mapping[str, FlagValue]]:
    return shorter(memory_inputs, {})


def _fewer_layers(memory_inputs: MemoryInputs) -> Iterator[Mapping[str, FlagValue]]:
    """Half of the layers on devices, or less; all layers of a model with workers stay there."""
    found = estimate(memory_inputs)
    if not found.workers and found.layers_offloaded:
        for count in range(found.layers_offloaded // 2, -1, -1):
            yield {"gpu-layers": count}


# In the order in which they are tried: what costs a user least goes first.
_KINDS: Final[Mapping[Kind, Callable[[MemoryInputs], Iterator[Mapping[str, FlagValue]]]]] = (
    MappingProxyType({"context": _shorter, "cache": smaller_cache, "layers": _fewer_layers})
)
