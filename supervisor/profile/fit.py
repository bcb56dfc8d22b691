"""Whether an instance can ever fit here, and if not, what would. Pure.

What counts is what it takes at its start, alone on the machine: the prompt cache and checkpoints
come with use, and who is in the way may leave. On devices only what an option moves there is
judged, as the engine itself keeps the rest in main memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from supervisor.errors import NoRoom
from supervisor.profile import kv
from supervisor.profile.engine import Device
from supervisor.profile.machine import Machine
from supervisor.profile.memory import Burden, Estimate, estimate
from supervisor.profile.profile import FlagValue
from supervisor.show import size

# Of main memory, left free for everything else on the machine.
RESERVE_SHARE: Final = 0.05
_MIB: Final = 1024**2
_CTX_SLOT_MIN: Final = 512
_SLOTS_EACH: Final = 64
_UNQUANTISED: Final = frozenset({"f32", "f16", "bf16"})


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that models may take.

    Attributes:
        host: Of main memory, in bytes.
        devices: Of each device that has memory of its own, by name, in bytes.
    """

    host: int
    devices: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options under which a model would fit.

    Attributes:
        flags: By today's names.
        host_bytes: What it takes of main memory at its start then.
    """

    flags: Mapping[str, FlagValue]
    host_bytes: int

    def __str__(self) -> str:
        flags = ", ".join(f"{key} = {value}" for key, value in self.flags.items())
        return f"{flags} ({size(self.host_bytes)})"


def room(machine: Machine, devices: Sequence[Device], budget_bytes: int | None = None) -> Room:
    """Return what models may take of this machine.

    Args:
        machine: The machine.
        devices: What layers can be offloaded to.
        budget_bytes: What all models together may take of main memory; None means all but the
            reserve.
    """
    most = int(machine.memory_bytes * (1 - RESERVE_SHARE))
    return Room(
        host=most if budget_bytes is None else min(budget_bytes, machine.memory_bytes),
        devices={one.name: one.total_mib * _MIB for one in devices if one.total_mib},
    )


def shortfall(found: Estimate, has: Room) -> str | None:
    """Return why an instance can never fit, or None when alone it could."""
    if found.host.at_start > has.host:
        return (
            f"it takes {size(found.host.at_start)} of main memory, "
            f"and models may have {size(has.host)} here"
        )
    for name, take in found.devices.items():
        if take.at_start > has.devices.get(name, 0):
            there = size(has.devices.get(name, 0))
            return f"it takes {size(take.at_start)} of {name}, which has {there}"
    return None


def remedies(burden: Burden, has: Room) -> tuple[Remedy, ...]:
    """Return what would fit: the largest of each kind of change, or all of them together."""
    kinds = (_fewer_slots(burden), _smaller_cache(burden), _shorter(burden, {}))
    found = [one for kind in kinds if (one := _first_fitting(burden, kind, has))]
    if found:
        return tuple(found)
    under = {key: value for flags in _smaller_cache(burden) for key, value in flags.items()}
    least = _shorter(burden, {**under, "parallel": 1})
    return tuple(one for one in [_first_fitting(burden, least, has)] if one)


def refuse(name: str, burden: Burden, has: Room) -> None:
    """Refuse an instance that can never fit.

    Raises:
        NoRoom: It could not start even alone; says by how much, and what would fit.
    """
    reason = shortfall(estimate(burden), has)
    if reason is None:
        return
    raise NoRoom(f"{name} can never fit: {reason}", hint=advice(remedies(burden, has)))


def advice(found: Sequence[Remedy]) -> str:
    """Return what to do about a model that can never fit."""
    if not found:
        return "no context is short enough: use a smaller model, or one quantised further"
    return f"this would fit: {'; or '.join(map(str, found))}"


def _first_fitting(
    burden: Burden, changes: Iterator[Mapping[str, FlagValue]], has: Room
) -> Remedy | None:
    for flags in changes:
        found = estimate(replace(burden, chosen={**burden.chosen, **flags}))
        if shortfall(found, has) is None:
            return Remedy(flags, found.host.at_start)
    return None


def _fewer_slots(burden: Burden) -> Iterator[Mapping[str, FlagValue]]:
    """Yield fewer slots, each with as much context as now."""
    each, count, is_shared = _context(burden)
    for fewer in _below(count):
        yield {"parallel": fewer, "ctx-size": each if is_shared else each * fewer}


def _below(count: int) -> Iterator[int]:
    """Yield smaller numbers down to 1, in large steps where they are large."""
    while (count := count - max(1, (count - _SLOTS_EACH) // 8)) > 0:
        yield count


def _shorter(burden: Burden, under: Mapping[str, FlagValue]) -> Iterator[Mapping[str, FlagValue]]:
    """Yield shorter contexts, each half of the one before."""
    each, count, is_shared = _context(burden)
    count = int(under.get("parallel", count))
    while each > _CTX_SLOT_MIN:
        each = max(_CTX_SLOT_MIN, each // 2 // kv.PADDING_TOKENS * kv.PADDING_TOKENS)
        yield {**under, "ctx-size": each if is_shared else each * count}


def _smaller_cache(burden: Burden) -> Iterator[Mapping[str, FlagValue]]:
    chosen = burden.chosen
    types = {str(chosen.get(f"cache-type-{one}", "f16")) for one in "kv"}
    has_flash = chosen.get("flash-attn", "auto") not in {"off", False}
    if types & _UNQUANTISED and has_flash and kv.can_quantise(burden.gguf):
        yield {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}


def _context(burden: Burden) -> tuple[int, int, bool]:
    """Return the context of one cache, the number of slots, and whether they share it."""
    cache = burden.cache
    return cache.ctx, cache.slots, cache.streams < cache.slots
