"""The models on this machine for the dashboard: whether they fit, their plans, and starts."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from attrs import define

from proxy.dashboard.host import StartOptions
from proxy.errors import BadRequest, UnknownModel, quote
from supervisor.backend.ollama import proxy_error
from supervisor.bench.variants import PLAIN
from supervisor.errors import CorralError, ModelInvalid
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload, ReloadResult
from supervisor.loading.controller import AdmissionController
from supervisor.models.stored_model import StoredModel, kind_of
from supervisor.plan import profile
from supervisor.plan.fit import misfit_reason, need_text
from supervisor.plan.plan import Plan
from supervisor.settings.load import FILE_NAME, Loaded, read_models
from supervisor.settings.schema import FoundModel, ModelSettings
from supervisor.settings.stored_models import StoredModels, table_of
from supervisor.system.paths import Directories

# The given part of `[models.NAME]`.
Table = Mapping[str, Any]
Models = Mapping[str, ModelSettings]


@define(eq=False, slots=False)
class MachineModelsAdapter:
    """Implements `MachineModels`; reads files in a thread.

    `make_planner`: makes the planner of settings as they run.
    """

    _reload: Reload
    _make_planner: Callable[[Loaded], LaunchPlanner]
    _admission: AdmissionController
    _directories: Directories

    async def list_models(self) -> Mapping[str, object]:
        return await asyncio.to_thread(self._list)

    async def plan(self, model: str, options: StartOptions) -> Mapping[str, object]:
        return await asyncio.to_thread(self._plan, model, options)

    async def start(self, model: str, options: StartOptions, *, save: bool) -> None:
        table = self._table_of(options)
        try:
            if model not in self._reload.settings.models:
                found = table_of(await asyncio.to_thread(self._find, model))
                flags = {**found["flags"], **table.get("flags", {})}
                added = {**found, **table, "flags": flags, "preload": False}
                await _finish(self._reload.add(read_models({model: added})))
            elif table:
                await _finish(self._reload.change(_changes(model, table)))
            self._admission.command("start", [model])
            if save:
                await asyncio.to_thread(self._save, model, table)
        except CorralError as error:
            raise proxy_error(error) from error

    def _save(self, model: str, table: Table) -> None:
        from supervisor.settings.edit import write_models  # noqa: PLC0415 (tomlkit takes memory)

        loaded = self._reload.loaded
        write_models(loaded.path or self._directories.config / FILE_NAME, loaded, [model], table)

    def check(self, model: str, profiles: Sequence[str]) -> None:
        """Raise as `plan` unless the model and the profiles, `plain` too, exist; reads files."""
        try:
            if model not in self._reload.settings.models:
                self._find(model)
        except CorralError as error:
            raise proxy_error(error) from error
        for name in profiles:
            if name != PLAIN:
                self._table_of(StartOptions(profile=name))

    def _list(self) -> Mapping[str, object]:
        stored = self._stored()
        others = stored.others
        planner = self._planner(others, {})
        own = self._reload.settings.models
        models = [
            *({"id": name, "name": name, "store": None, **_facts(planner, name)} for name in own),
            *(
                {
                    "id": model.id,
                    "name": model.name,
                    "store": model.store,
                    **_facts(planner, model.id, model.problem),
                    "size_bytes": model.size_bytes,
                }
                for model in others
            ),
        ]
        return {
            "models": models,
            "profiles": profile.names(self._directories.profiles),
            "notes": stored.catalogue.notes,
        }

    def _plan(self, model: str, options: StartOptions) -> Mapping[str, object]:
        table = self._table_of(options)
        is_known = model in self._reload.settings.models
        try:
            others = [] if is_known else [self._find(model)]
            planner = self._planner(others, _changes(model, table) if table else {})
            made = planner.plan(model)
            argv = planner.launches.argv(made, f"{model}.0")
        except CorralError as error:
            raise proxy_error(error) from error
        return {
            "command": shlex.join(argv),
            "slots": made.slots,
            "ctx_size": made.ctx_size,
            "profile": planner.entry(model).profile,
            "lines": [asdict(line) for line in made.lines],
            "omitted": [asdict(line) for line in made.omitted],
            "warnings": made.warnings,
            **_fit(planner, made),
        }

    def _table_of(self, options: StartOptions) -> Table:
        """Return the settings that are given; raises BadRequest if there is no such profile."""
        names = profile.names(self._directories.profiles)
        if options.profile is not None and options.profile not in names:
            known = ", ".join(names)
            raise BadRequest(f"there is no profile {quote(options.profile)}; there are: {known}")
        numbers = {"ctx-size": options.ctx_size, "parallel": options.slots}
        flags = {key: value for key, value in numbers.items() if value is not None}
        return {
            key: value for key, value in (("profile", options.profile), ("flags", flags)) if value
        }

    def _planner(self, others: Iterable[StoredModel], changes: Models) -> LaunchPlanner:
        """Plan with other models and changes too, as if they were served."""
        usable = {other.id: FoundModel(**table_of(other)) for other in others if not other.problem}
        loaded = self._reload.loaded.with_models(usable).with_changes(changes)
        return self._make_planner(loaded).reading_once()

    def _stored(self) -> StoredModels:
        return StoredModels(self._reload.settings, self._directories)

    def _find(self, model: str) -> StoredModel:
        others = self._stored().others
        found = next((other for other in others if other.id == model), None)
        if found is None:
            known = [*self._reload.settings.models, *(other.id for other in others)]
            raise UnknownModel(model, known)
        if found.problem:
            raise ModelInvalid(f"{found.name} cannot be served: {found.problem}")
        return found


async def _finish(reload: asyncio.Task[ReloadResult | CorralError]) -> None:
    """Wait for a reload, which goes on if the page is gone; raises its error."""
    result = await asyncio.shield(reload)
    if isinstance(result, CorralError):
        raise result
    if result.failures:
        raise CorralError("; ".join(map(str, result.failures)))


def _changes(model: str, table: Table) -> Models:
    # Only the settings that are given are used; the path makes it a whole table.
    return read_models({model: {"path": "unused.gguf", **table}})


def _facts(planner: LaunchPlanner, model: str, problem: str | None = None) -> dict[str, object]:
    unknown = {"size_bytes": None, "quantisation": "", "kind": "", "profile": ""}
    if problem:
        return {**unknown, "fits": None, "fit": problem}
    try:
        made = planner.plan(model)
    except CorralError as error:
        return {**unknown, "fits": None, "fit": error.message}
    return {
        "size_bytes": made.gguf.size_bytes,
        "quantisation": made.gguf.quantisation,
        "kind": kind_of(made.gguf),
        "profile": planner.entry(model).profile,
        **_fit(planner, made),
    }


def _fit(planner: LaunchPlanner, made: Plan) -> dict[str, object]:
    has = planner.capacity(made.engine)
    misfit = misfit_reason(made.estimate, has)
    return {
        "fits": misfit is None,
        "fit": misfit or need_text(made.estimate, has, made.ctx_size),
    }
