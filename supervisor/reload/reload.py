"""Applies new settings to what runs, and only where they change something.

Everything that can be wrong is found before anything is changed (`diff.prepare`). Then

1. unchanged replicas take the new settings for their next run, and keep running;
2. removed replicas drain and stop, those of a model with changed ones after the changes;
3. added replicas start, unless their model is new and has no `preload`;
4. changed replicas are replaced one after another, by a successor beside them where they serve and
   memory allows, else in place. The first of a model that fails ends the changes of that model:
   what served keeps serving, or starts again, with its old settings.

A reload is over when all new replicas serve or have failed; removed ones may still be draining.
Reloads run one at a time, and not while values are adapted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from supervisor.errors import CorralError
from supervisor.events import Emit
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launch_id import ReplicaId
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.reload.diff import Difference, PrepareNodes, ReloadPlan, prepare, reload_notes
from supervisor.reload.replace import Replacer, ReplicaFailure, start_failure
from supervisor.settings.load import Loaded
from supervisor.settings.schema import ModelSettings


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The result of a reload or of a dry run; some of the changed replicas may have failed."""

    difference: Difference
    notes: tuple[str, ...]
    failures: tuple[ReplicaFailure, ...] = ()


class Reload:
    """Applies new settings; `loaded` are those that were applied last.

    `read` reads the same sources again, in a thread, and raises CorralError.
    """

    def __init__(  # noqa: PLR0913 (each is a seam of its own)
        self,
        fleet: Fleet,
        loaded: Loaded,
        *,
        read: Callable[[], Loaded],
        make_planner: Callable[[Loaded], LaunchPlanner],
        prepare_nodes: PrepareNodes,
        emit: Emit,
        replacer: Replacer,
    ) -> None:
        self.loaded = loaded
        self._began_with = loaded.settings
        self._added: Mapping[str, ModelSettings] = {}
        self._fleet = fleet
        self._read = read
        self._make_planner = make_planner
        self._prepare_nodes = prepare_nodes
        self._emit = emit
        self._replacer = replacer
        self._lock = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        return self._lock.locked()

    async def run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        """Reload, or find out what a reload would do.

        An error means that nothing was changed. It is not raised, because a signal and a change of
        the file have no caller that could handle it.
        """
        async with self._lock, self._replacer.lock:
            prepared = await self._prepared(self._read_again, self._prepare_nodes)
            if isinstance(prepared, CorralError):
                if not dry_run:
                    self._emit("settings.rejected", reason=prepared.message)
                return prepared
            notes = tuple(
                reload_notes(self._began_with, self.loaded.settings, prepared.loaded.settings)
            )
            if dry_run:
                return ReloadResult(prepared.difference, notes)
            done = ReloadResult(prepared.difference, notes, await self._perform(prepared))
            self._report(done)
            return done

    async def replan(self, model: str) -> ReloadResult | CorralError:
        """Apply to one model what is planned otherwise now; the settings are not read again."""
        async with self._lock, self._replacer.lock:
            prepared = await self._prepared(lambda: self.loaded, _prepare_no_nodes)
            if isinstance(prepared, CorralError):
                return prepared
            prepared = replace(prepared, difference=prepared.difference.only([model]))
            return ReloadResult(prepared.difference, (), await self._perform(prepared))

    async def _prepared(
        self, read: Callable[[], Loaded], prepare_nodes: PrepareNodes
    ) -> ReloadPlan | CorralError:
        replicas = self._fleet.replicas()
        try:
            return await asyncio.to_thread(
                prepare, replicas, read, self._make_planner, prepare_nodes
            )
        except CorralError as error:
            return error

    async def add(self, models: Mapping[str, ModelSettings]) -> ReloadResult | CorralError:
        """Serve further models until the daemon ends; the settings are not read again.

        Later reloads keep them; a model of the same name in the settings file then replaces one.
        """
        async with self._lock, self._replacer.lock:
            prepared = await self._prepared(
                lambda: self.loaded.with_models(models), _prepare_no_nodes
            )
            if isinstance(prepared, CorralError):
                return prepared
            self._added = {**self._added, **models}
            prepared = replace(prepared, difference=prepared.difference.only(models))
            done = ReloadResult(prepared.difference, (), await self._perform(prepared))
            self._report(done)
            return done

    def _read_again(self) -> Loaded:
        """Without a settings file they stay, and what else changed is taken up, as an engine is."""
        return self._read().with_models(self._added) if self.loaded.path else self.loaded

    async def _perform(self, prepared: ReloadPlan) -> tuple[ReplicaFailure, ...]:
        failures = []
        async with asyncio.TaskGroup() as group:
            starts = [
                group.create_task(start_failure(replica)) for replica in self._begin(prepared)
            ]
            for model, places in groupby(prepared.difference.changed, key=lambda one: one.model):
                failures += await self._replace_all(places, prepared)
                self._retire(one for one in prepared.difference.removed if one.model == model)
        return (*failures, *(failure for start in starts if (failure := start.result())))

    def _begin(self, prepared: ReloadPlan) -> list[Replica]:
        """Do everything that needs no waiting; return the replicas that were started."""
        difference, planner, fleet = prepared.difference, prepared.planner, self._fleet
        self.loaded = prepared.loaded
        prepared.apply_nodes()
        fleet.set_planner(planner)
        self._retire(difference.removed_at_once)
        for place in difference.kept:
            fleet.apply_settings(fleet.models[place.model].at(place.number), planner)
        up = {name for name, model in fleet.models.items() if _is_to_run(model)}
        fresh = [fleet.add(place, planner) for place in difference.added]
        begun = [replica for replica in fresh if replica.place.model in up]
        for replica in begun:
            replica.instance.start()
        return begun

    def _retire(self, places: Iterable[ReplicaId]) -> None:
        for place in places:
            self._fleet.retire(self._fleet.models[place.model].at(place.number))

    async def _replace_all(
        self, places: Iterable[ReplicaId], prepared: ReloadPlan
    ) -> list[ReplicaFailure]:
        for place in places:
            replica = self._fleet.models[place.model].at(place.number)
            failure = await self._replacer.replace(replica, prepared.planner, prepared.plans[place])
            if failure:
                return [failure]
        return []

    def _report(self, done: ReloadResult) -> None:
        notes = [*done.notes, *map(str, done.failures)]
        self._emit("settings.reloaded", **done.difference.names(), notes=notes)


def _prepare_no_nodes(_: Loaded) -> Callable[[], None]:
    return lambda: None


def _is_to_run(model: Model) -> bool:
    """Return whether replicas that are added to a model start; a new model's, as at a start."""
    return model.is_wanted if model.is_configured else model.residency.preload
