"""Looks at the models: their files, their plans, and whether all of them fit into memory."""

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
class Need:
    """What a model takes of memory.

    Attributes:
        model: Its name.
        weights_bytes: Of its file; processes that serve the same file share it.
        cache_bytes: KV cache of all its processes.
        locked_bytes: What it wants held in main memory; 0 where it does not ask for that.
        is_preloaded: Whether it comes up with the daemon.
    """

    model: str
    weights_bytes: int
    cache_bytes: int
    locked_bytes: int = 0
    is_preloaded: bool = True

    @property
    def bytes(self) -> int:
        """Return both together."""
        return self.weights_bytes + self.cache_bytes


def check_models(planner: LaunchPlanner) -> Iterator[Finding | Need]:
    """Yield what is true of each model, and what it needs where it can be planned."""
    if not planner.entries:
        cure = "corral start FILE.gguf serves a file; corral model get smollm2 fetches one"
        yield Finding("models", "ok", "none is configured", cure)
    for name, entry in planner.entries.items():
        try:
            plan = planner.plan(name)
        except CorralError as error:
            yield failed(f"model {name}", error)
            continue
        yield from check_plan(plan)
        if reason := planner.keeping.reason(plan):
            text = f"its conversations are not kept over restarts: {reason}"
            yield Finding(f"model {name}", "ok", text)
        found = need(plan, planner.replicas(entry.name).count)
        yield replace(found, is_preloaded=planner.model_settings(entry.name).preload)


def check_plan(plan: Plan) -> Iterator[Finding]:
    """Yield what is true of a model that can be planned: so its file is there, whole, and fits."""
    name = f"model {plan.model}"
    gguf = plan.gguf
    about = f"{gguf.architecture} {gguf.quantisation}, {size(gguf.size_bytes)}: {gguf.path}"
    yield Finding(name, "ok", f"{about}; {plan.slots} slots, {plan.ctx_size} tokens in all")
    for warning in plan.warnings:
        if warning == plan.engine.warning:
            continue  # told of the engine already
        fault, _, cure = warning.partition("; ")
        yield Finding(name, "warn", fault, cure or None)
    for line in plan.omitted:
        wanted = f"{line.flag} {line.value or ''}".rstrip()
        yield Finding(name, "ok", f"goes without {wanted} ({line.origin}): {line.reason}")


def need(plan: Plan, replicas: int) -> Need:
    """Return what a model takes of memory; buffers for computing come on top."""
    cache = kv_cache.cache_bytes(plan.gguf, plan.memory_inputs.cache)
    weights = plan.gguf.tensor_bytes
    return Need(plan.model, weights, cache * replicas, weights if _locks(plan) else 0)


def _locks(plan: Plan) -> bool:
    """Tell whether it asks to be held in main memory, the limit allowing."""
    asked = [f"{line.flag} {line.value}" for line in plan.lines]
    asked += [f"{line.flag} {line.value}" for line in plan.omitted]
    return any("mlock" in words for words in asked) and not plan.engine.devices


def check_memory(needs: Sequence[Need], machine: Machine, device_bytes: int) -> Finding:
    """Compare what the models need with what there is.

    One that can never fit is a fault; several that do not fit together take turns.

    Args:
        needs: Of the models that are not up yet; those that are have taken their memory already.
        machine: This machine.
        device_bytes: Memory of all devices; 0 where the models run on the CPU.
    """
    whole, free = machine.memory_bytes, machine.memory_available_bytes
    there = f"{size(free)} of {size(whole)} are free"
    if device_bytes:
        whole = free = device_bytes
        there = f"the devices have {size(whole)}"
    if not needs:
        return Finding("memory", "ok", f"every model is up or none is configured; {there}")
    cure = "use a smaller model, ctx-size or replicas, or the profile low-memory"
    largest = max(needs, key=lambda one: one.bytes)
    if largest.bytes > whole and not device_bytes:  # what a device cannot hold, the CPU runs
        text = f"weights and caches of {largest.model} take {size(largest.bytes)}; {there}"
        return Finding("memory", "fail", text, cure)
    at_once = [one for one in needs if one.is_preloaded]
    wanted = sum(one.bytes for one in at_once)
    parts = ", ".join(f"{one.model} {size(one.bytes)}" for one in at_once)
    about = f"weights and caches take {size(wanted)} ({parts})" if parts else "none is preloaded"
    called = len(needs) - len(at_once)
    more = f"; {called} more come when they are called" if called and parts else ""
    if wanted > free:
        return Finding("memory", "warn", f"{about}{more}; {there}", f"{cure}, or preload = false")
    return Finding("memory", "ok", f"{about}{more}; {there}")
