"""`corral plan`: the exact command for a model, the origin of each flag, and its memory."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from supervisor.autoscale.slots import most_slots
from supervisor.builds.discover import Device, free_bytes, list_devices
from supervisor.cli.targets import choose
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import AdaptedValue, ModelStatus, WorkerStatus
from supervisor.errors import CorralError
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import CommandResult, colored, size, table
from supervisor.plan.draft import offered_types, reason_against_mtp
from supervisor.plan.estimate import Estimate, MemoryBreakdown, estimate
from supervisor.plan.fit import MemoryCapacity, Suggestion, advice, misfit_reason, suggestions
from supervisor.plan.plan import Plan
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import Setting, SettingsByFlag
from supervisor.plan.shortage import Replicas
from supervisor.plan.tuned_profile import Tuned
from supervisor.rpc.address import KnownWorkers
from supervisor.slot_store.store import RestoreOutcome
from supervisor.system import machine
from supervisor.system.paths import Directories, directories


@dataclass(frozen=True, slots=True)
class ChangedValues:
    """What follows demand and load, and what was given up after the engine ran out of memory."""

    adapted: SettingsByFlag
    reduced: SettingsByFlag


def read_changed_values(socket: Path, entry: ModelEntry) -> ChangedValues:
    """Return the values with which the daemon would start a model now; none without a daemon.

    A daemon that serves another model by that name, or with another profile, says nothing of it.
    """
    try:
        models = Client(socket).status()["models"]
    except CorralError:
        models = []
    found = next((model for model in models if _is_same(model, entry)), None)
    adapted, reduced = (found["adapted"], found["reduced"]) if found else ([], [])
    return ChangedValues(_settings(adapted), _settings(reduced))


def _settings(values: list[AdaptedValue]) -> SettingsByFlag:
    return {
        change["key"]: Setting(change["value"], change["origin"], change["reason"])
        for change in values
    }


def _is_same(model: ModelStatus, entry: ModelEntry) -> bool:
    named = model["name"], model["path"], model["profile"]
    return named == (entry.name, str(entry.path), entry.profile)


def see_workers(
    known: KnownWorkers, planner: LaunchPlanner, model: str, where: Directories
) -> None:
    """Note what a running daemon knows of workers; without a daemon, ask those of a model.

    A worker that serves the daemon's engine would not answer.
    """
    if not planner.workers.addresses_of(model):
        return
    try:
        statuses = Client(where.control_socket).status()["workers"]
    except CorralError:
        asyncio.run(planner.workers.look(model, planner.engine_of(planner.entry(model))))
        return
    for worker in statuses:
        _note(known, planner, worker)


def _note(known: KnownWorkers, planner: LaunchPlanner, worker: WorkerStatus) -> None:
    if not planner.workers.is_configured(worker["name"]):
        return
    if worker["local"]:
        known.note_port(worker["name"], int(worker["address"].rpartition(":")[2]))
    address = planner.workers.address(worker["name"])
    if str(address) != worker["address"]:
        return
    if worker["devices_bytes"]:
        devices = (
            Device("RPC", str(address), size_bytes >> 20) for size_bytes in worker["devices_bytes"]
        )
        known.note_devices(address, tuple(devices))
    if worker["reason"]:
        known.note_problem(address, worker["reason"])


@dataclass(frozen=True, slots=True)
class _Found:
    """What the command shows.

    Attributes:
        argv: Of the first instance.
        room: What all models may take.
        free_bytes: Main memory that is free now.
        device_free_bytes: The same of each device, as the engine lists it.
        misfit: Why the model can never fit, if so.
        tuned: The tuned profile in use.
        not_persisted_reason: Why conversations are not saved, as a clause; None where they are.
        restored: What the engine did with the first one that was restored; None before that.
        encrypts: Whether conversations are encrypted where they are saved.
        most_slots: How many slots it may get while requests queue; None if their number is fixed.
    """

    plan: Plan
    argv: tuple[str, ...]
    room: MemoryCapacity
    free_bytes: int
    device_free_bytes: Mapping[str, int]
    replicas: Replicas
    misfit: str | None
    would_fit: Sequence[Suggestion]
    tuned: Tuned | None
    not_persisted_reason: str | None
    restored: RestoreOutcome | None
    encrypts: bool
    most_slots: int | None


def plan(word: str, config: Path | None) -> CommandResult:
    where = directories()
    targets = choose([word], config, where)
    known = KnownWorkers()
    planner = LaunchPlanner(targets.loaded.settings, where, known_workers=known)
    (name,) = targets.names
    see_workers(known, planner, name, where)
    changed = read_changed_values(where.control_socket, planner.entry(name))
    planner = planner.adapting(name, changed.adapted)
    planner.reductions.set(planner.entry(name), changed.reduced)
    made = planner.plan(name)
    room = planner.capacity(made.engine)
    misfit = misfit_reason(made.estimate, room)
    found = _Found(
        plan=made,
        argv=planner.launches.argv(made, f"{made.model}.0"),
        room=room,
        free_bytes=machine.read().memory_available_bytes,
        device_free_bytes=_device_free(made),
        replicas=planner.places.replicas(name),
        misfit=misfit,
        would_fit=suggestions(made.memory_inputs, room) if misfit else (),
        tuned=planner.tuned_profiles.find_applicable(planner.entry(name)),
        not_persisted_reason=planner.launches.slot_persistence.reason(made),
        restored=planner.launches.slot_persistence.outcome(made),
        encrypts=planner.launches.slot_persistence.encrypts,
        most_slots=most_slots(planner, name),
    )
    notes = [*_draft_note(made)]
    notes += [f"it can never fit: {misfit}", advice(found.would_fit)] if misfit else []
    return CommandResult(_data(found), _render(found), (*made.warnings, *notes))


def _draft_note(made: Plan) -> Iterator[str]:
    """Say that the model could draft for itself, where it does not."""
    if not made.gguf.draft_layers or made.is_speculative:
        return
    if reason_against_mtp(made.gguf, offered_types(made.engine.flags)) is None:
        yield 'the model has layers that draft for it (MTP): profile = "speculative" uses them'


def _device_free(made: Plan) -> Mapping[str, int]:
    """Return the free bytes of devices that the model may use, as far as the engine lists them."""
    if not made.estimate.devices:
        return {}
    return free_bytes(list_devices(made.engine))


def _data(found: _Found) -> dict[str, object]:
    made, taken = found.plan, found.plan.estimate
    return {
        "model": made.model,
        "engine": str(made.engine.path),
        "argv": found.argv,
        "slots": made.slots,
        "ctx_size": made.ctx_size,
        "most_slots": found.most_slots,
        "reduced": {key: asdict(setting) for key, setting in made.reduced.items()},
        "lines": [asdict(line) for line in made.lines],
        "omitted": [asdict(line) for line in made.omitted],
        "warnings": made.warnings,
        "tuned": found.tuned and {"path": str(found.tuned.path), **asdict(found.tuned.evidence)},
        "replicas": asdict(found.replicas),
        "conversations": {
            "kept": found.not_persisted_reason is None,
            "reason": found.not_persisted_reason,
            "restored": found.restored and asdict(found.restored),
            "encrypted": found.encrypts,
            "swa_full_bytes": _full_window_bytes(made),
        },
        "memory": {
            "host": _bytes(taken.host),
            "devices": {name: _bytes(take) for name, take in taken.devices.items()},
            "workers": {
                name: {
                    **_bytes(worker.taken),
                    "has": worker.has_bytes,
                    "free": worker.free_bytes,
                    "here": worker.is_main_memory,
                }
                for name, worker in taken.workers.items()
            },
            "shared_bytes": taken.mapped_bytes,
            "layers_offloaded": taken.layers_offloaded,
            "room": asdict(found.room),
            "free_bytes": found.free_bytes,
            "device_free_bytes": found.device_free_bytes,
            "fits": found.misfit is None,
            "would_fit": [dict(suggestion.flags) for suggestion in found.would_fit],
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
    omitted = [
        f"  {line.flag} {line.value or ''}".rstrip()
        + f"  {colored(line.origin, 'dim')}: {line.reason}"
        for line in made.omitted
    ]
    parts = [
        f"{made.model}: {made.slots} slots, {made.ctx_size} tokens of context in all",
        *_slot_hints(found),
        *(
            f"{key} = {setting.value} for want of memory: {setting.reason}"
            for key, setting in made.reduced.items()
        ),
        *([found.tuned.summary] if found.tuned else []),
        *lines,
        *(["", "omitted:", *omitted] if omitted else []),
        "",
        *_memory(found),
        conversations(
            found.plan, found.not_persisted_reason, found.restored, encrypts=found.encrypts
        ),
        "",
        shlex.join(found.argv),
    ]
    return "\n".join(parts)


def _slot_hints(found: _Found) -> Iterator[str]:
    if found.most_slots and found.most_slots > found.plan.slots:
        yield f"up to {found.most_slots} slots while requests queue, each with as much context"


def conversations(
    made: Plan,
    not_persisted_reason: str | None,
    restored: RestoreOutcome | None = None,
    *,
    encrypts: bool = False,
) -> str:
    if not_persisted_reason is None:
        saved = "conversations are saved across restarts" + (", encrypted" if encrypts else "")
        return "; ".join([saved, *_saved_slot_lines(made, restored)])
    text = f"conversations are not saved across restarts: {not_persisted_reason}"
    if "swa-full" in not_persisted_reason:
        text += f", for {size(_full_window_bytes(made))} more per instance"
    return text


def _saved_slot_lines(made: Plan, restored: RestoreOutcome | None) -> Iterator[str]:
    if restored:
        found, expected = restored.found_tokens, restored.expected_tokens
        yield f"this engine found {found} of {expected} tokens of the first one restored"
    else:
        yield "whether this engine uses them is tried with the first one restored"
    if made.gguf.recurrent:
        yield "its recurrent layers use one only where a prompt continues all of it"


def _full_window_bytes(made: Plan) -> int | None:
    """Return what swa-full would add; None without a sliding window, or with swa-full already."""
    chosen = made.memory_inputs.chosen
    if not made.gguf.sliding_window or chosen.get("swa-full"):
        return None
    full = replace(made.memory_inputs, chosen={**chosen, "swa-full": True})
    return _total_bytes(estimate(full)) - _total_bytes(made.estimate)


def _total_bytes(taken: Estimate) -> int:
    workers = (worker.taken for worker in taken.workers.values())
    return sum(take.total for take in (taken.host, *taken.devices.values(), *workers))


def _memory(found: _Found) -> Iterator[str]:
    """Yield a table of one instance's memory, without columns that are all zero."""
    estimate = found.plan.estimate
    workers = {f"worker {name}": worker.taken for name, worker in estimate.workers.items()}
    taken = {"main memory": estimate.host, **estimate.devices, **workers}
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
    yield f"main memory: {size(found.free_bytes)} free, {size(found.room.host)} for all models"
    for name, free in found.device_free_bytes.items():
        if name in found.room.devices:
            yield f"{name}: {size(free)} free of {size(found.room.devices[name])}"
    for name, worker in estimate.workers.items():
        if worker.free_bytes is not None:
            yield f"worker {name}: {size(worker.free_bytes)} free of {size(worker.has_bytes)}"
    if found.replicas.count > 1:
        yield (
            f"{found.replicas.count} instances ({found.replicas.reason}), each with "
            f"{size(estimate.own_bytes)} of its own"
        )
