"""Settings that cannot work on this machine, though the build has them. Pure.

The engine would start without them and only log a warning (`--mlock` and `--prio` without
permission), or not start at all (a quantised V cache without flash attention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from supervisor.flags.auto import PlanInputs
from supervisor.memory import kv_cache
from supervisor.memory.context import Chosen


def reason_against(key: str, inputs: PlanInputs, chosen: Chosen) -> str | None:
    """Why a setting cannot work here, or None."""
    check = _CHECKS.get(key)
    return check(inputs, chosen) if check else None


def _gpu_layers(inputs: PlanInputs, chosen: Chosen) -> str | None:
    return None if inputs.device_bytes or "rpc" in chosen else "the engine lists no device"


def _load_mode(inputs: PlanInputs, chosen: Chosen) -> str | None:
    weights, allowed = inputs.gguf.tensor_bytes, inputs.machine.memlock_bytes
    if "mlock" not in str(chosen["load-mode"]):
        return None
    if inputs.device_bytes:
        return "the weights go to the device and need not be locked in main memory"
    if allowed is not None and allowed < weights:
        return f"{weights >> 20} MiB cannot be locked: the limit is {allowed >> 20} MiB"
    if weights > inputs.machine.memory_bytes // 2:
        return "locking more than half of the memory would starve other programs"
    return None


def _prio(inputs: PlanInputs, chosen: Chosen) -> str | None:
    raises = str(chosen["prio"]) not in {"0", "-1"}
    return (
        "raising the priority is not permitted"
        if raises and not inputs.machine.may_renice
        else None
    )


def _numa(inputs: PlanInputs, chosen: Chosen) -> str | None:
    """`distribute` pins each thread to all CPUs of a node, also to those outside of the affinity.

    Source: llama.cpp, ggml-cpu.c, set_numa_thread_affinity.
    """
    if chosen["numa"] != "distribute" or inputs.machine.numa_nodes > 1:
        return None
    return "there is one NUMA node, or not all CPUs of each may be used"


def _cache_type_k(inputs: PlanInputs, chosen: Chosen) -> str | None:
    return _not_quantisable(inputs, chosen, "cache-type-k")


def _cache_type_v(inputs: PlanInputs, chosen: Chosen) -> str | None:
    is_quantised = chosen["cache-type-v"] not in kv_cache.UNQUANTISED
    if is_quantised and chosen.get("flash-attn") in {"off", False}:
        return "a quantised V cache needs flash attention"
    return _not_quantisable(inputs, chosen, "cache-type-v")


def _not_quantisable(inputs: PlanInputs, chosen: Chosen, key: str) -> str | None:
    if chosen[key] in kv_cache.UNQUANTISED or kv_cache.can_quantise(inputs.gguf):
        return None
    return f"heads of {inputs.gguf.key_length} values are not multiples of {kv_cache.BLOCK}"


_CHECKS: Final[Mapping[str, Callable[[PlanInputs, Chosen], str | None]]] = MappingProxyType(
    {
        "gpu-layers": _gpu_layers,
        "load-mode": _load_mode,
        "prio": _prio,
        "numa": _numa,
        "cache-type-k": _cache_type_k,
        "cache-type-v": _cache_type_v,
    }
)
