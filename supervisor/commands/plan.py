"""`corral plan`: a model's exact command, where each part comes from, and the memory it takes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from supervisor.commands.choice import choose
from supervisor.fleet.workshop import Workshop
from supervisor.host.paths import directories
from supervisor.profile import machine
from supervisor.profile.fit import Room, advice, remedies, shortfall
from supervisor.profile.memory import Estimate, Take, estimate
from supervisor.profile.plan import Plan
from supervisor.profile.replicas import Replicas
from supervisor.show import Outcome, paint, size, table


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
        unkept: Why no conversations are kept, as a clause; None where they are.
    """

    plan: Plan
    argv: tuple[str, ...]
    estimate: Estimate
    room: Room
    free_bytes: int
    replicas: Replicas
    unkept: str | None


def plan(word: str, config: Path | None) -> Outcome:
    """Plan a model as a start would, and start nothing.

    Raises:
        CorralError: It could not be started; says why.
    """
    where = directories()
    choice = choose([word], config, where)
    workshop = Workshop(choice.loaded.settings, where)
    (name,) = choice.names
    made = workshop.plan(name)
    found = _Found(
        plan=made,
        argv=workshop.launch_argv(made, f"{made.model}.0"),
        estimate=made.estimate,
        room=workshop.room(made.engine),
        free_bytes=machine.read().memory_available_bytes,
        replicas=workshop.replicas(name),
        unkept=workshop.keeping.reason(made),
    )
    notes = (*made.warnings, *_misfit(found))
    return Outcome(_data(found), _render(found), notes)


def _misfit(found: _Found) -> Iterator[str]:
    """Yield why it can never fit here, and what would."""
    reason = shortfall(found.estimate, found.room)
    if reason:
        yield f"it can never fit: {reason}"
        yield advice(remedies(found.plan.burden, found.room))


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
            "kept": found.unkept is None,
            "reason": found.unkept,
            "swa_full_bytes": _full_window_bytes(made),
        },
        "memory": {
            "host": _bytes(taken.host),
            "devices": {name: _bytes(take) for name, take in taken.devices.items()},
            "shared_bytes": taken.mapped_bytes,
            "layers_offloaded": taken.layers_offloaded,
            "room": asdict(found.room),
            "free_bytes": found.free_bytes,
            "fits": shortfall(taken, found.room) is None,
            "would_fit": [dict(one.flags) for one in remedies(made.burden, found.room)]
            if shortfall(taken, found.room)
            else [],
        },
    }


def _bytes(take: Take) -> Mapping[str, int]:
    return {**asdict(take), "total": take.total, "at_start": take.at_start}


def _render(found: _Found) -> str:
    made = found.plan
    words = [" ".join(filter(None, (line.flag, line.value))) for line in made.lines]
    width = max(map(len, words), default=0)
    lines = [
        f"  {word:{width}}  {paint(line.origin, 'dim')}" + (f": {line.why}" if line.why else "")
        for word, line in zip(words, made.lines, strict=True)
    ]
    left_out = [
        f"  {line.flag} {line.value or ''}".rstrip() + f"  {paint(line.origin, 'dim')}: {line.why}"
        for line in made.omitted
    ]
    parts = [
        f"{made.model}: {made.slots} slots, {made.ctx_size} tokens of context in all",
        *lines,
        *(["", "left out:", *left_out] if left_out else []),
        "",
        *_memory(found),
        conversations(found.plan, found.unkept),
        "",
        shlex.join(found.argv),
    ]
    return "\n".join(parts)


def conversations(made: Plan, unkept: str | None) -> str:
    """Return whether conversations outlive their engine, and what a whole window would take.

    Args:
        made: The plan.
        unkept: Why they do not, as a clause; None where they do.
    """
    if unkept is None:
        return "conversations are kept over restarts"
    text = f"conversations are not kept over restarts: {unkept}"
    more = _full_window_bytes(made)
    return f"{text}, for {size(more)} more an instance" if "swa-full" in unkept else text


def _full_window_bytes(made: Plan) -> int | None:
    """Return what swa-full would take on top; None where there is no window, or it is full."""
    chosen = made.burden.chosen
    if not made.gguf.sliding_window or chosen.get("swa-full"):
        return None
    full = replace(made.burden, chosen={**chosen, "swa-full": True})
    return _whole(estimate(full)) - _whole(made.estimate)


def _whole(taken: Estimate) -> int:
    return sum(take.total for take in (taken.host, *taken.devices.values()))


def _memory(found: _Found) -> Iterator[str]:
    """Yield a table of what one instance takes, of each memory what is taken at all."""
    taken = {"main memory": found.estimate.host, **found.estimate.devices}
    used = [f.name for f in fields(Take) if any(getattr(take, f.name) for take in taken.values())]
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
            f"{found.replicas.count} instances ({found.replicas.why}), each "
            f"{size(found.estimate.own_bytes)} of its own"
        )
