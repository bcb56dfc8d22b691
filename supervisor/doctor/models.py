"""Looks at the models: their files, their plans, and whether all of them fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from supervisor.control.wire import ModelStatus
from supervisor.doctor.finding import Finding, failed
from supervisor.errors import CorralError
from supervisor.fleet.workshop import Workshop
from supervisor.profile import kv
from supervisor.profile.machine import Machine
from supervisor.profile.plan import Plan
from supervisor.show import size


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes of memory.

    Attributes:
        model: Its name.
        weights_bytes: Of its file; processes that serve the same file share it.
        cache_bytes: KV cache of all its processes.
        locked_bytes: What it wants held in main memory; 0 where it does not ask for that.
    """

    model: str
    weights_bytes: int
    cache_bytes: int
    locked_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Return both together."""
        return self.weights_bytes + self.cache_bytes


def check_models(workshop: Workshop) -> Iterator[Finding | Need]:
    """Yield what is true of each model, and what it needs where it can be planned."""
    if not workshop.entries:
        cure = "corral start FILE.gguf serves a file; corral model get smollm2 fetches one"
        yield Finding("models", "ok", "none is configured", cure)
    for name, entry in workshop.entries.items():
        try:
            plan = workshop.plan(name)
        except CorralError as error:
            yield failed(f"model {name}", error)
            continue
        yield from check_plan(plan)
        if reason := workshop.keeping.reason(plan):
            text = f"its conversations are not kept over restarts: {reason}"
            yield Finding(f"model {name}", "ok", text)
        yield need(plan, workshop.replicas(entry.name).count)


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
        yield Finding(name, "ok", f"goes without {wanted} ({line.origin}): {line.why}")


def check_drafts(models: Iterable[ModelStatus]) -> Iterator[Finding]:
    """Yield which of the models that run answer more slowly for what they draft."""
    for model in models:
        drafts = [one["draft"] for one in model["instances"]]
        slow = (draft for draft in drafts if draft and draft["trouble"])
        for draft in itertools.islice(slow, 1):
            yield Finding(f"model {model['name']}", "warn", draft["trouble"] or "", draft["cure"])


def need(plan: Plan, replicas: int) -> Need:
    """Return what a model takes of memory; buffers for computing come on top."""
    cache = kv.cache_bytes(plan.gguf, plan.burden.cache)
    weights = plan.gguf.tensor_bytes
    return Need(plan.model, weights, cache * replicas, weights if _locks(plan) else 0)


def _locks(plan: Plan) -> bool:
    """Tell whether it asks to be held in main memory, the limit allowing."""
    asked = [f"{line.flag} {line.value}" for line in plan.lines]
    asked += [f"{line.flag} {line.value}" for line in plan.omitted]
    return any("mlock" in words for words in asked) and not plan.engine.devices


def check_memory(needs: Sequence[Need], machine: Machine, device_bytes: int) -> Finding:
    """Compare what the models need with what there is.

    Args:
        needs: Of the models that are not up yet; those that are have taken their memory already.
        machine: This machine.
        device_bytes: Memory of all devices; 0 where the models run on the CPU.
    """
    wanted = sum(one.bytes for one in needs)
    parts = ", ".join(f"{one.model} {size(one.bytes)}" for one in needs)
    cure = "use a smaller model, ctx-size or replicas, or the profile low-memory"
    about = f"weights and caches take {size(wanted)}" + (f" ({parts})" if parts else "")
    if device_bytes:
        text = f"{about}; the devices have {size(device_bytes)}"
        return _fits(wanted <= device_bytes, text, cure)
    free = machine.memory_available_bytes
    text = f"{about}; {size(free)} of {size(machine.memory_bytes)} are free"
    if wanted > machine.memory_bytes:
        return Finding("memory", "fail", text, cure)
    return _fits(wanted <= free, text, cure)


def _fits(does: bool, text: str, cure: str) -> Finding:  # noqa: FBT001 (reads as a claim)
    return Finding("memory", "ok", text) if does else Finding("memory", "warn", text, cure)
