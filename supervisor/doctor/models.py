"""Checks the models: files, plans, and whether all of them fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from supervisor.doctor.finding import Finding, failed
from supervisor.errors import CorralError
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.machine import Machine
from supervisor.memory import kv_cache
from supervisor.output import size


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of a model, without compute buffers.

    Attributes:
        model: Its name.
        weights_bytes: Size of its tensors, shared by all its processes.
        cache_bytes: KV cache of all its processes.
        locked_bytes: Main memory to lock; 0 where the model does not ask for that.
        is_preloaded: Whether it loads with the daemon.
    """

    model: str
    weights_bytes: int
    cache_bytes: int
    locked_bytes: int = 0
    is_preloaded: bool = True

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes


def check_models(planner: LaunchPlanner) -> Iterator[Finding | MemoryNeed]:
    if not planner.entries:
        fix = "corral start FILE.gguf serves a file; corral model get smollm2 fetches one"
        yield Finding("models", "ok", "none configured", fix)
    for name in planner.entries:
        try:
            plan = planner.plan(name)
        except CorralError as error:
            yield failed(f"model {name}", error)
            continue
        yield from check_plan(plan)
        if reason := planner.launches.slot_persistence.reason(plan):
            text = f"conversations are not saved across restarts: {reason}"
            is_expected = not planner.launches.slot_persistence.problem
            yield Finding(f"model {name}", "ok" if is_expected else "warn", text)
        yield from _check_trial(planner, name)
        found = memory_need(plan, len(planner.places.of(name)))
        yield replace(found, is_preloaded=planner.model_settings(name).preload)


def _check_trial(planner: LaunchPlanner, name: str) -> Iterator[Finding]:
    if (trial := planner.places.trial(name)) is None:
        return
    try:
        planner.plan_trial(name, trial)
    except CorralError as error:
        yield failed(f"trial of {name}", error)


def check_plan(plan: Plan) -> Iterator[Finding]:
    """Report on a model that can be planned, so its file exists and is complete."""
    name, gguf = f"model {plan.model}", plan.gguf
    about = f"{gguf.architecture} {gguf.quantisation}, {size(gguf.size_bytes)}: {gguf.path}"
    yield Finding(name, "ok", f"{about}; {plan.slots} slots, {plan.ctx_size} tokens in all")
    for warning in plan.warnings:
        if warning != plan.engine.warning:  # check_engine reports that one
            fault, _, fix = warning.partition("; ")
            yield Finding(name, "warn", fault, fix or None)
    for line in plan.omitted:
        flag = f"{line.flag} {line.value or ''}".rstrip()
        yield Finding(name, "ok", f"runs without {flag} ({line.origin}): {line.reason}")


def memory_need(plan: Plan, replicas: int) -> MemoryNeed:
    cache = kv_cache.cache_bytes(plan.gguf, plan.memory_inputs.cache)
    weights = plan.gguf.tensor_bytes
    return MemoryNeed(plan.model, weights, cache * replicas, weights if _locks(plan) else 0)


def _locks(plan: Plan) -> bool:
    """Return whether a model wants locked main memory, even where the limit forbids it."""
    flags = [f"{line.flag} {line.value}" for line in (*plan.lines, *plan.omitted)]
    return any("mlock" in flag for flag in flags) and not plan.engine.devices


def check_memory(needs: Sequence[MemoryNeed], machine: Machine, device_bytes: int) -> Finding:
    """Compare what the models need with what there is.

    A model that can never fit is a failure; models that do not fit together take turns.

    Args:
        needs: Of the models that are not loaded yet.
        machine: This machine.
        device_bytes: Memory of all devices; 0 where the models run on the CPU.
    """
    whole, free = machine.memory_bytes, machine.memory_available_bytes
    available = f"{size(free)} of {size(whole)} are free"
    if device_bytes:
        whole = free = device_bytes
        available = f"the devices have {size(whole)}"
    if not needs:
        return Finding("memory", "ok", f"all models are loaded or none is configured; {available}")
    fix = "use a smaller model, ctx-size or replicas, or the profile low-memory"
    largest = max(needs, key=lambda one: one.bytes)
    if largest.bytes > whole and not device_bytes:  # the CPU runs what a device cannot hold
        text = f"weights and caches of {largest.model} take {size(largest.bytes)}; {available}"
        return Finding("memory", "fail", text, fix)
    preloaded = [one for one in needs if one.is_preloaded]
    wanted_bytes = sum(one.bytes for one in preloaded)
    text = "none is preloaded"
    if preloaded:
        parts = ", ".join(f"{one.model} {size(one.bytes)}" for one in preloaded)
        text = f"weights and caches take {size(wanted_bytes)} ({parts})"
        on_request = len(needs) - len(preloaded)
        text += f"; {on_request} more load on request" if on_request else ""
    if wanted_bytes > free:
        return Finding("memory", "warn", f"{text}; {available}", f"{fix}, or preload = false")
    return Finding("memory", "ok", f"{text}; {available}")
