"""`corral init`: a commented corral.toml for this machine and the models on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.commands.config_schema import write_schema
from supervisor.commands.stored_models import StoredModels, table_of
from supervisor.commands.targets import choose
from supervisor.engines.discover import Engine
from supervisor.errors import CorralError, SettingsInvalid
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories, directories
from supervisor.memory.fit import misfit_reason
from supervisor.output import CommandResult, size
from supervisor.settings.edit import Edit, change_file, write_file
from supervisor.settings.initial import InitialModel, initial_text
from supervisor.settings.load import FILE_NAME, merge
from supervisor.settings.schema import Settings

_MODELS_MAX: Final = 20


@dataclass(frozen=True, slots=True)
class _Choice:
    """Tables of models by name, and how many more there were."""

    tables: dict[str, dict[str, Any]]
    left_out: int


def init(words: Sequence[str], config: Path | None, *, is_forced: bool) -> CommandResult:
    """Write the settings file; the models are those named, or all that are stored here."""
    where = directories()
    path = (config or where.config / FILE_NAME).absolute()
    if path.exists() and not is_forced:
        raise SettingsInvalid(
            f"there is a settings file already: {path}",
            hint="corral config set KEY VALUE changes it; --force writes a new one, and keeps a "
            "backup of the old one",
        )
    choice = _choice(words, where)
    planner = LaunchPlanner(merge({"models": choice.tables}, None).settings, where)
    models = [_model(name, table, planner) for name, table in choice.tables.items()]
    text = initial_text(_machine_line(machine.read(), _engine(planner)), models)
    notes = _write(path, text)
    write_schema(path)
    if choice.left_out:
        notes += (f"{choice.left_out} more models are stored here: corral model list",)
    data = {"file": str(path), "models": list(choice.tables)}
    return CommandResult(data, _shown(path, models), notes)


def _choice(words: Sequence[str], where: Directories) -> _Choice:
    if words:
        targets = choose(words, None, where)
        known = targets.loaded.settings.models
        return _Choice({name: _own_table(known[name]) for name in targets.names}, 0)
    found = StoredModels(Settings(), where).catalogue.models
    served = [one for one in found if one.problem is None]
    tables = {one.id: dict(table_of(one)) for one in served[:_MODELS_MAX]}
    return _Choice(tables, len(served) - len(tables))


def _own_table(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = model.model_dump(mode="json", include={"path", "flags", "aliases"})
    return found


def _model(name: str, table: dict[str, Any], planner: LaunchPlanner) -> InitialModel:
    kept = {key: value for key, value in table.items() if value}
    try:
        made = planner.plan(name)
        reason = misfit_reason(made.estimate, planner.capacity(made.engine))
    except CorralError as error:
        return InitialModel(name, kept, "", error.message)
    return InitialModel(name, kept, _facts(made), reason, generates=made.embedding is None)


def _facts(made: Plan) -> str:
    taken = made.estimate
    on_devices = "".join(f", {size(one.at_start)} of {name}" for name, one in taken.devices.items())
    context = f"{made.slots} slots with {made.ctx_size // max(made.slots, 1)} tokens each"
    return (
        f"{made.gguf.architecture}, {made.gguf.quantisation}, {size(made.gguf.size_bytes)}: "
        f"takes {size(taken.host.total)} of main memory{on_devices}; {context}"
    )


def _engine(planner: LaunchPlanner) -> Engine | None:
    try:
        return planner.engine()
    except CorralError:
        return None


def _machine_line(here: Machine, engine: Engine | None) -> str:
    devices = ", ".join(one.description for one in engine.devices) if engine else ""
    found = f"engine build {engine.build}" if engine else "no llama-server (corral doctor)"
    return (
        f"{here.physical_cores} cores, {size(here.memory_bytes)} of memory, "
        f"{devices or 'no GPU'}; {found}"
    )


def _write(path: Path, text: str) -> tuple[str, ...]:
    if path.exists():
        backup = change_file(path, lambda _: Edit(text, ())).backup
        return (f"the file before: {backup}",)
    write_file(path, lambda _: Edit(text, ()))
    return ()


def _shown(path: Path, models: Sequence[InitialModel]) -> str:
    return "\n".join([f"wrote {path}", *_next(models)])


def _next(models: Sequence[InitialModel]) -> Iterator[str]:
    if any(one.is_usable for one in models):
        yield "corral start serves its models"
    else:
        yield "it has no model yet: corral model get smollm2 downloads one"
