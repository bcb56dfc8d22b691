"""`corral plan`: a model's exact command, where each part comes from, and the memory it takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from supervisor.commands.targets import choose
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host import machine
from supervisor.host.paths import directories
from supervisor.memory.estimate import Estimate, MemoryBreakdown, estimate
from supervisor.memory.fit import MemoryCapacity, advice, misfit_reason, suggestions
from supervisor.memory.replicas import Replicas
from supervisor.output import CommandResult, colored, size, table


@dataclass(frozen=True, slots=True)
class _Found:
    """Everything that is shown of a model.

    Attributes:
        plan: What one instance runs.
        argv: The whole command line of the first.
        estimate: What one instance takes.
        room: What models may take.
        free_bytes: Main memory that is free now.
        replicas: How many instances there are.
        not_persisted_reason: Why no conversations are kept, as a clause; None where they are.
    """

    plan: Plan
    argv: tuple[str, ...]
    estimate: Estimate
    room: MemoryCapacity
    free_bytes: int
    replicas: Replicas
    not_persisted_reason: str | None


def plan(word: str, config: Path | None) -> CommandResult:
    """Plan a model as a start would, and start nothing.

    Raises:
        CorralError: It could not be started; says why.
    """
    where = directories()
    choice = choose([word], config, where)
    planner = LaunchPlanner(choice.loaded.settings, where)
    (name,) = choice.names
    made = planner.plan(name)
    found = _Found(
        plan=made,
        argv=planner.launch_argv(made, f"{made.model}.0"),
        estimate=made.estimate,
        room=planner.capacity(made.engine),
        free_bytes=machine.read().memory_available_bytes,
        replicas=planner.replicas(name),
        not_persisted_reason=planner.keeping.reason(made),
    )
    notes = (*made.warnings, *_misfit(found))
    return CommandResult(_data(found), _render(found), notes)


def _misfit(found: _Found) -> Iterator[str]:
    """Yield why it can never fit here, and what would."""
    reason = misfit_reason(found.estimate, found.room)
    if reason:
        yield f"it can never fit: {reason}"
        yield advice(suggestions(found.plan.memory_inputs, found.room))


def _data(found: _Found) -> dict[str, object]:
    made, taken = found.plan, found.estimate
    return {
        "model": made.model,
        "engine": str(made.engine.path),
        "argv": found.argv,
        "slots": made.slots,
        "ctx_size": made.ctx_size,
        "lines": [asdict(line) for line in made.lines],
        "omitted": [asdict(line) for line in made.omitted],
        "warnings": made.warnings,
        "replicas": asdict(found.replicas),
        "conversations": {
            "kept": found.not_persisted_reason is None,
            "reason": found.not_persisted_reason,
            "swa_full_bytes": _full_window_bytes(made),
        },
        "memory": {
            "host": _bytes(taken.host),
            "devices": {name: _bytes(take) for name, take in taken.devices.items()},
            "shared_bytes": taken.mapped_bytes,
            "layers_offloaded": taken.layers_offloaded,
            "room": asdict(found.room),
            "free_bytes": found.free_bytes,
            "fits": misfit_reason(taken, found.room) is None,
            "would_fit": [dict(one.flags) for one in suggestions(made.memory_inputs, found.room)]
            if misfit_reason(taken, found.room)
            else [],
        },
    }


def _bytes(take: MemoryBreakdown) -> Mapping[str, int]:
    return {**asdict(take), "total": take.total, "at_start": take.at_start}


def _render(found: _Found) -> str:
    made = found.plan
    words = [" ".join(filter(None, (line.flag, line.value))) for line in made.lines]
    width = max(map(len, words), default=0)
    lines = [
        f"  {word:{width}}  {colored(line.origin, 'dim')}"
        + (f": {line.reason}" if line.reason else "")
        for word, line in zip(words, made.lines, strict=True)
    ]
    left_out = [
        f"  {line.flag} {line.value or ''}".rstrip()
        + f"  {colored(line.origin, 'dim')}: {line.reason}"
        for line in made.omitted
    ]
    parts = [
        f"{made.model}: {made.slots} slots, {made.ctx_size} tokens of context in all",
        *lines,
        *(["", "left out:", *left_out] if left_out else []),
        "",
        *_memory(found),
        conversations(found.plan, found.not_persisted_reason),
        "",
        shlex.join(found.argv),
    ]
    return "\n".join(parts)


def conversations(made: Plan, not_persisted_reason: str | None) -> str:
    """Return whether conversations outlive their engine, and what a whole window would take.

    Args:
        made: The plan.
        not_persisted_reason: Why they do not, as a clause; None where they do.
    """
    if not_persisted_reason is None:
        return "conversations are kept over restarts"
    text = f"conversations are not kept over restarts: {not_persisted_reason}"
    more = _full_window_bytes(made)
    return (
        f"{text}, for {size(more)} more an instance" if "swa-full" in not_persisted_reason else text
    )


def _full_window_bytes(made: Plan) -> int | None:
    """Return what swa-full would take on top; None where there is no window, or it is full."""
    chosen = made.memory_inputs.chosen
    if not made.gguf.sliding_window or chosen.get("swa-full"):
        return None
    full = replace(made.memory_inputs, chosen={**chosen, "swa-full": True})
    return _whole(estimate(full)) - _whole(made.estimate)


def _whole(taken: Estimate) -> int:
    return sum(take.total for take in (taken.host, *taken.devices.values()))


def _memory(found: _Found) -> Iterator[str]:
    """Yield a table of what one instance takes, of each memory what is taken at all."""
    taken = {"main memory": found.estimate.host, **found.estimate.devices}
    used = [
        f.name
        for f in fields(MemoryBreakdown)
        if any(getattr(take, f.name) for take in taken.values())
    ]
    head = ["", *(name.replace("_", " ") for name in used), "total"]
    rows = [
        [name, *(size(getattr(take, part)) for part in used), size(take.total)]
        for name, take in taken.items()
    ]
    yield table(head, rows)
    free = f"{size(found.free_bytes)} of main memory are free, models may have "
    yield free + size(found.room.host)
    if found.replicas.count > 1:
        yield (
            f"{found.replicas.count} instances ({found.replicas.reason}), each "
            f"{size(found.estimate.own_bytes)} of its own"
        )
