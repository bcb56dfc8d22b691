"""Implements `corral plan`: the command for a model, the origin of each flag, and its memory."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from supervisor.autoscale.slots import most_slots
from supervisor.builds.discover import Device, free_bytes, list_devices
from supervisor.cli.targets import choose
from supervisor.daemon.control_messages import AdaptedValue, DaemonStatus, WorkerStatus
from supervisor.daemon.model_commands import running_status
from supervisor.errors import AccessDenied
from supervisor.fleet.model import saved_room
from supervisor.fleet.planner import LaunchPlanner
from supervisor.models.metadata import shards_of
from supervisor.output import (
    CommandResult,
    colored,
    hanging,
    is_fitting,
    size,
    table,
    terminal_columns,
)
from supervisor.plan.draft import offered_types, reason_against_mtp
from supervisor.plan.estimate import Estimate, MemoryBreakdown, estimate
from supervisor.plan.fit import advice, misfit_reason, suggestions
from supervisor.plan.placement import layers_with_experts_kept
from supervisor.plan.plan import Plan, PlanLine
from supervisor.plan.resolve import ModelEntry
from supervisor.plan.setting import Setting, SettingsByFlag
from supervisor.rpc.address import KnownWorkers
from supervisor.settings.load import read_changes
from supervisor.slot_store.store import RestoreOutcome
from supervisor.system import machine
from supervisor.system.page_cache import held_bytes
from supervisor.system.paths import directories


def changes_of(status: DaemonStatus | None, name: str, path: Path) -> Mapping[str, Any]:
    """Return the settings that commands changed in a running daemon, if it has the same model."""
    return next(
        (
            model.changed or {}
            for model in (status.models if status else ())
            if (model.name, model.path) == (name, str(path))
        ),
        {},
    )


def changed_values(
    status: DaemonStatus | None, entry: ModelEntry
) -> tuple[SettingsByFlag, SettingsByFlag]:
    """Return the flags that the daemon adapted to the load, and those it reduced to save memory.

    Both are empty without a daemon, or if its model of that name has another file or profile.
    """
    wanted = entry.name, str(entry.path), entry.profile
    for model in status.models if status else ():
        if (model.name, model.path, model.profile) == wanted:
            return _settings(model.adapted), _settings(model.reduced)
    return {}, {}


def _settings(values: list[AdaptedValue]) -> SettingsByFlag:
    return {change.key: Setting(change.value, change.origin, change.reason) for change in values}


def note_workers(
    known: KnownWorkers, planner: LaunchPlanner, model: str, status: DaemonStatus | None
) -> None:
    """Note the workers' state from a running daemon; without a daemon, probe a model's workers.

    A worker that serves the daemon's engine would not answer a probe.
    """
    if not planner.workers.addresses_of(model):
        return
    if status is None:
        asyncio.run(planner.workers.probe_remote(model, planner.engine_of(planner.entry(model))))
    for worker in status.workers if status else ():
        _note(known, planner, worker)


def _note(known: KnownWorkers, planner: LaunchPlanner, worker: WorkerStatus) -> None:
    if not planner.workers.is_configured(worker.name):
        return
    if worker.local:
        known.note_port(worker.name, int(worker.address.rpartition(":")[2]))
    address = planner.workers.address(worker.name)
    if str(address) != worker.address:
        return
    if worker.devices_bytes:
        devices = (
            Device("RPC", str(address), size_bytes >> 20) for size_bytes in worker.devices_bytes
        )
        known.note_devices(address, tuple(devices))
    if worker.reason:
        known.note_problem(address, worker.reason)


def _bytes(take: MemoryBreakdown) -> Mapping[str, int]:
    return {**asdict(take), "total": take.total, "at_start": take.at_start}


def conversations(
    made: Plan,
    not_persisted_reason: str | None,
    restored: RestoreOutcome | None = None,
    *,
    encrypts: bool = False,
    room: str = "",
) -> str:
    if not_persisted_reason is None:
        saved = "conversations are saved across restarts" + (", encrypted" if encrypts else "")
        return "; ".join([saved, *([room] if room else []), *_saved_slot_lines(made, restored)])
    return f"conversations are not saved across restarts: {not_persisted_reason}"


def _saved_slot_lines(made: Plan, restored: RestoreOutcome | None) -> Iterator[str]:
    if restored:
        found, expected = restored.found_tokens, restored.expected_tokens
        yield f"this engine found {found} of {expected} tokens of the first restored one"
    else:
        yield "the first restored one will show whether this engine uses them"
    if made.gguf.recurrent:
        yield "its recurrent layers use one only if a prompt continues all of it"
    elif made.window_tokens:
        yield "its sliding window uses one only if a prompt continues all of it"


def kept_text(weights_bytes: int, cached_bytes: int | None, *, saves: bool) -> str:
    """Return what an unload keeps, so that the next load is fast."""
    now = "" if cached_bytes is None else f" (now {size(cached_bytes)} of {size(weights_bytes)})"
    weights = f"the weights{now} in the page cache, while nothing else needs the memory"
    return f"an unload keeps {'conversations on disk, and ' if saves else ''}{weights}"


def _cached_bytes(shards: Sequence[Path]) -> int | None:
    found = [held_bytes(shard) for shard in shards]
    known = [count for count in found if count is not None]
    return sum(known) if len(known) == len(found) else None


def _experts_kept(layers: Sequence[int]) -> str:
    if not layers:
        return ""
    is_range = layers[-1] - layers[0] == len(layers) - 1
    numbers = f"{layers[0]} to {layers[-1]}" if is_range else ", ".join(map(str, layers))
    return f"; experts of layers {numbers} stay in main memory"


def _full_window_bytes(made: Plan) -> int | None:
    """Return the memory that swa-full would add; None without a sliding window or if it is set."""
    chosen = made.memory_inputs.chosen
    if not made.gguf.sliding_window or chosen.get("swa-full"):
        return None
    full = replace(made.memory_inputs, chosen={**chosen, "swa-full": True})
    return _total_bytes(estimate(full)) - _total_bytes(made.estimate)


def _total_bytes(taken: Estimate) -> int:
    workers = (worker.taken for worker in taken.workers.values())
    return sum(take.total for take in (taken.host, *taken.devices.values(), *workers))


def plan(model: str, config: Path | None) -> CommandResult:
    where = directories()
    targets = choose([model], config, where)
    (name,) = targets.names
    status, settings = running_status(), targets.loaded.settings
    changes = changes_of(status, name, settings.models[name].path)
    loaded = targets.loaded.with_changes(read_changes({name: changes}))
    known = KnownWorkers()
    planner = LaunchPlanner(loaded.settings, where, known_workers=known)
    note_workers(known, planner, name, status)
    adapted, reduced = changed_values(status, planner.entry(name))
    planner = planner.adapting(name, adapted)
    planner.reductions.set(planner.entry(name), reduced)
    found = _Planned(planner, name)
    made, misfit, notes = found.plan, found.misfit, []
    if loaded.settings != settings:
        notes.append(f"the running daemon has {_settings_text(changes)} until it ends")
    has_draft_layers = made.gguf.draft_layers and not made.is_speculative
    if has_draft_layers and reason_against_mtp(made.gguf, offered_types(made.engine.flags)) is None:
        notes.append(
            'the model has layers that draft for it (MTP): profile = "speculative" uses them'
        )
    notes += [f"it can never fit: {misfit}", advice(found.would_fit)] if misfit else []
    return CommandResult(found.data(), found.text(terminal_columns()), (*made.warnings, *notes))


def _settings_text(changes: Mapping[str, Any]) -> str:
    settings = {**changes, **changes.get("flags", {})}
    return ", ".join(f"{key} = {value}" for key, value in settings.items() if key != "flags")


def flag_lines(lines: Sequence[PlanLine], columns: int | None) -> Iterator[str]:
    """Yield each flag with its origin and reason."""
    words = [" ".join(filter(None, (line.flag, line.value))) for line in lines]
    width = max(map(len, words), default=0)
    if columns:  # a long flag, such as the path of the model, has its reason below it
        width = min(width, columns // 3)
    for word, line in zip(words, lines, strict=True):
        reason = f"{line.origin}: {line.reason}" if line.reason else line.origin
        begin = f"  {word}"
        rest = hanging(f"  {word:{width}}  ", reason, columns).removeprefix(begin)
        yield begin + rest.replace(line.origin, colored(line.origin, "dim"), 1)


def memory_table(taken: Mapping[str, MemoryBreakdown], columns: int | None) -> str:
    """Return the memory by place and purpose, without purposes that take none.

    On a narrow terminal a purpose is a row.
    """
    used = [
        part.name
        for part in fields(MemoryBreakdown)
        if any(getattr(take, part.name) for take in taken.values())
    ]
    head = ["", *(name.replace("_", " ") for name in used), "total"]
    rows = [
        [name, *(size(getattr(take, part)) for part in used), size(take.total)]
        for name, take in taken.items()
    ]
    if is_fitting(head, rows, columns):
        return table(head, rows)
    turned = [list(cells) for cells in zip(head, *rows, strict=True)]
    return table(turned[0], turned[1:])


class _Planned:
    """The plan of a model, and the other facts that the command shows."""

    def __init__(self, planner: LaunchPlanner, name: str) -> None:
        self.plan = made = planner.plan(name)
        persistence = planner.launches.slot_persistence
        self.argv = planner.launches.argv(made, f"{made.model}.0")  # of the first instance
        self.room = planner.capacity(made.engine)  # memory that all models together may take
        self.free_bytes = machine.read().memory_available_bytes
        # Free memory of each device, as the engine lists it.
        self.device_free_bytes = (
            free_bytes(list_devices(made.engine)) if made.estimate.devices else {}
        )
        self.replicas = planner.replicas(name)
        self.misfit = misfit_reason(made.estimate, self.room)  # why it can never fit, or None
        self.would_fit = suggestions(made.memory_inputs, self.room) if self.misfit else ()
        self.tuned = planner.tuned(planner.entry(name))
        self.groups = planner.settings.group_rules.rules(name)
        # Why conversations are not saved, as a clause, or None.
        self.not_persisted_reason = persistence.reason(made)
        self.restored = persistence.outcome(made)  # of the first restored conversation, or None
        self.encrypts = persistence.encrypts
        try:
            self.budget = persistence.budget()
        except (OSError, AccessDenied) as error:  # the disk fails; the plan is still of use
            self.budget = persistence.limits
            self.not_persisted_reason = self.not_persisted_reason or str(error)
        self.saved_max, self.disk_room = saved_room(made, self.budget)
        self.cached_bytes = _cached_bytes(shards_of(made.gguf.path))  # None: unknown
        # Limit of slots while requests queue; None if their number is fixed.
        self.most_slots = most_slots(planner, name)

    def data(self) -> dict[str, object]:
        made, taken = self.plan, self.plan.estimate
        return {
            "model": made.model,
            "engine": str(made.engine.path),
            "argv": self.argv,
            "slots": made.slots,
            "ctx_size": made.ctx_size,
            "most_slots": self.most_slots,
            "reduced": {key: asdict(setting) for key, setting in made.reduced.items()},
            "lines": [asdict(line) for line in made.lines],
            "omitted": [asdict(line) for line in made.omitted],
            "warnings": made.warnings,
            "tuned": self.tuned and {"path": str(self.tuned.path), **asdict(self.tuned.evidence)},
            "groups": self.groups,
            "replicas": asdict(self.replicas),
            "conversations": {
                "kept": self.not_persisted_reason is None,
                "reason": self.not_persisted_reason,
                "restored": self.restored and asdict(self.restored),
                "encrypted": self.encrypts,
                "disk_bytes": self.budget.model_bytes,
                "disk_is_auto": self.budget.is_auto,
                "full_ones_on_disk": self.saved_max,
                "swa_full_bytes": _full_window_bytes(made),
            },
            "kept_by_unload": {
                "conversations": self.not_persisted_reason is None,
                "weights_bytes": made.gguf.size_bytes,
                "weights_cached_bytes": self.cached_bytes,
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
                "layers_with_experts_kept": layers_with_experts_kept(made.gguf, taken.placement),
                "room": asdict(self.room),
                "free_bytes": self.free_bytes,
                "device_free_bytes": self.device_free_bytes,
                "fits": self.misfit is None,
                "would_fit": [dict(flags) for flags, _ in self.would_fit],
            },
        }

    def text(self, columns: int | None) -> str:
        made = self.plan
        most_slots = self.most_slots or 0
        more_slots = f"up to {most_slots} slots while requests queue, each with as much context"
        about = [
            f"{made.model}: {made.slots} slots, {made.ctx_size} tokens of context in all",
            *([more_slots] if most_slots > made.slots else []),
            *(
                f"{key} = {setting.value} for want of memory: {setting.reason}"
                for key, setting in made.reduced.items()
            ),
            *([self.tuned.summary] if self.tuned else []),
            *self.groups,
        ]
        saved = conversations(
            made,
            self.not_persisted_reason,
            self.restored,
            encrypts=self.encrypts,
            room=self.disk_room,
        )
        saves = self.not_persisted_reason is None
        kept = kept_text(made.gguf.size_bytes, self.cached_bytes, saves=saves)
        parts = [
            *(hanging("", line, columns) for line in about),
            *flag_lines(made.lines, columns),
            *(["", "omitted:", *flag_lines(made.omitted, columns)] if made.omitted else []),
            "",
            memory_table(self._taken(), columns),
            *(hanging("", line, columns) for line in (*self._memory(), saved, kept)),
            "",
            shlex.join(self.argv),
        ]
        return "\n".join(parts)

    def _taken(self) -> dict[str, MemoryBreakdown]:
        """Return the memory of one instance, by place."""
        estimate = self.plan.estimate
        workers = {f"worker {name}": worker.taken for name, worker in estimate.workers.items()}
        return {"main memory": estimate.host, **estimate.devices, **workers}

    def _memory(self) -> Iterator[str]:
        """Yield lines on free memory."""
        estimate = self.plan.estimate
        yield f"main memory: {size(self.free_bytes)} free, {size(self.room.host)} for all models"
        for name, free in self.device_free_bytes.items():
            if name in self.room.devices:
                yield f"{name}: {size(free)} free of {size(self.room.devices[name])}"
        if taken := estimate.layers_offloaded:
            gguf = self.plan.gguf
            experts = _experts_kept(layers_with_experts_kept(gguf, estimate.placement))
            yield f"on devices: {taken} of {gguf.layers + 1} layers, with the output{experts}"
        for name, worker in estimate.workers.items():
            if worker.free_bytes is not None:
                yield f"worker {name}: {size(worker.free_bytes)} free of {size(worker.has_bytes)}"
        if self.replicas.count > 1:
            yield (
                f"{self.replicas.count} instances ({self.replicas.reason}), each with "
                f"{size(estimate.own_bytes)} for itself"
            )
