"""Decides whether an instance can ever fit on this machine, and suggests options that fit. Pure.

Only the memory at its start counts, without other models: the prompt cache and checkpoints grow
with use, and other models can be unloaded. On devices only layers that an option forces there
count, because the engine keeps the rest in main memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from supervisor.builds.discover import Device
from supervisor.builds.help import FlagValue
from supervisor.errors import OutOfMemory
from supervisor.output import size
from supervisor.plan import kv_cache
from supervisor.plan.estimate import Estimate, MemoryBreakdown, MemoryInputs, estimate
from supervisor.system.machine import Machine

# Share of main memory left for everything else on the machine.
RESERVE_SHARE: Final = 0.05
_MIB: Final = 1024**2
_CTX_SLOT_MIN: Final = 512


@dataclass(frozen=True, slots=True)
class MemoryCapacity:
    """Bytes of main memory, and of each device with its own memory, that models may take."""

    host: int
    devices: Mapping[str, int]


# Options that make a model fit, and the main memory that it then takes at its start.
Suggestion = tuple[Mapping[str, FlagValue], int]


def capacity(
    machine: Machine, devices: Sequence[Device], budget_bytes: int | None = None
) -> MemoryCapacity:
    most = int(machine.memory_bytes * (1 - RESERVE_SHARE))
    return MemoryCapacity(
        host=most if budget_bytes is None else min(budget_bytes, machine.memory_bytes),
        devices={device.name: device.total_mib * _MIB for device in devices if device.total_mib},
    )


def misfit_reason(found: Estimate, has: MemoryCapacity) -> str | None:
    local_bytes = found.local_workers_bytes
    if found.host.at_start + local_bytes > has.host:
        within = f", {size(local_bytes)} of it in workers" if local_bytes else ""
        return (
            f"it needs {size(found.host.at_start + local_bytes)} of main memory{within}, "
            f"but models may use {size(has.host)}"
        )
    return first_lack(
        *((f"worker {name}", own.taken, own.has_bytes) for name, own in found.workers.items()),
        *((name, taken, has.devices.get(name, 0)) for name, taken in found.devices.items()),
    )


def need_text(found: Estimate, has: MemoryCapacity, ctx_tokens: int) -> str:
    """Return a clause: `needs 5.1 GiB of 15.2 GiB main memory with 8,192 tokens of context`."""
    parts = [f"{size(found.host.at_start)} of {size(has.host)} main memory"]
    for name, take in found.devices.items():
        parts.append(f"{size(take.at_start)} of {size(has.devices.get(name, 0))} on {name}")
    context = f" with {ctx_tokens:,} tokens of context" if ctx_tokens else ""
    return f"needs {' and '.join(parts)}{context}"


def first_lack(*needs: tuple[str, MemoryBreakdown, int | None], what: str = "") -> str | None:
    """Return the first memory with less than the needed bytes, as a clause, or None.

    Each memory has its name, the needed bytes, and its size in bytes, None if unknown.
    """
    for name, needed, has_bytes in needs:
        if has_bytes is not None and needed.at_start > has_bytes:
            return f"it needs {size(needed.at_start)} of {name}, which has {size(has_bytes)}{what}"
    return None


def suggestions(memory_inputs: MemoryInputs, has: MemoryCapacity) -> tuple[Suggestion, ...]:
    """Return the mildest fitting change of each kind, or else a combined change."""
    kinds = (_fewer_slots, smaller_cache, shorter_contexts)
    found = (_first_fitting(memory_inputs, kind(memory_inputs), has) for kind in kinds)
    if fitting := tuple(filter(None, found)):
        return fitting
    under = {key: value for flags in smaller_cache(memory_inputs) for key, value in flags.items()}
    # All kinds of changes together.
    least = shorter_contexts(memory_inputs, {**under, "parallel": 1})
    combined = _first_fitting(memory_inputs, least, has)
    return (combined,) if combined else ()


def check_fits(name: str, memory_inputs: MemoryInputs, has: MemoryCapacity) -> None:
    reason = misfit_reason(estimate(memory_inputs), has)
    if reason is None:
        return
    raise OutOfMemory(
        f"{name} can never fit: {reason}", hint=advice(suggestions(memory_inputs, has))
    )


def advice(found: Sequence[Suggestion]) -> str:
    if not found:
        return "no context length fits: use a smaller model, or a stronger quantisation"
    texts = (
        f"{', '.join(f'{key} = {value}' for key, value in flags.items())} ({size(host_bytes)})"
        for flags, host_bytes in found
    )
    return f"this would fit: {'; or '.join(texts)}"


def _first_fitting(
    memory_inputs: MemoryInputs, changes: Iterator[Mapping[str, FlagValue]], has: MemoryCapacity
) -> Suggestion | None:
    for flags in changes:
        found = estimate(memory_inputs.with_flags(flags))
        if misfit_reason(found, has) is None:
            return flags, found.host.at_start + found.local_workers_bytes
    return None


def _fewer_slots(memory_inputs: MemoryInputs) -> Iterator[Mapping[str, FlagValue]]:
    """Yield smaller numbers of slots with the same context each, in large steps at first."""
    each, count, is_shared = _context(memory_inputs)
    while (count := count - max(1, (count - 64) // 8)) > 0:
        yield {"parallel": count, "ctx-size": each if is_shared else each * count}


def shorter_contexts(
    memory_inputs: MemoryInputs, under: Mapping[str, FlagValue] = MappingProxyType({})
) -> Iterator[Mapping[str, FlagValue]]:
    """Yield shorter contexts, each half of the previous one, together with the flags `under`."""
    each, count, is_shared = _context(memory_inputs)
    count = int(under.get("parallel", count))
    while each > _CTX_SLOT_MIN:
        each = max(_CTX_SLOT_MIN, each // 2 // kv_cache.PADDING_TOKENS * kv_cache.PADDING_TOKENS)
        yield {**under, "ctx-size": each if is_shared else each * count}


def smaller_cache(memory_inputs: MemoryInputs) -> Iterator[Mapping[str, FlagValue]]:
    """Yield a quantised cache unless there is one or the model cannot have one."""
    chosen = memory_inputs.chosen
    types = {str(chosen.get(f"cache-type-{letter}", "f16")) for letter in "kv"}
    has_flash = chosen.get("flash-attn", "auto") not in {"off", False}
    if types & kv_cache.UNQUANTISED and has_flash and kv_cache.can_quantise(memory_inputs.gguf):
        yield {"cache-type-k": "q8_0", "cache-type-v": "q8_0"}


def _context(memory_inputs: MemoryInputs) -> tuple[int, int, bool]:
    """Return the context of a cache, the number of slots, and whether slots share a cache."""
    cache = memory_inputs.cache
    return cache.ctx, cache.slots, cache.streams < cache.slots
