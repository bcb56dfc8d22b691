"""Applies new settings to what runs, only where they change something; what starts a reload.

Finds what new settings change, and everything that is wrong with them, before they are applied.
Launch fingerprints are compared, never command lines: those also depend on how many instances share
the machine, so one more model would restart all others for the sake of a thread each. A replica
whose fingerprint is unchanged keeps running; its next run is planned with what is true then.

Applies new settings to what runs, and only where they change something. Everything that can be
wrong is found before anything is changed (`diff.prepare`). Then

1. unchanged replicas take the new settings for their next run, and keep running;
2. removed replicas drain and stop, those of a model with changed ones after the changes;
3. added replicas start, unless their model is new and has no `preload`;
4. changed replicas are replaced one after another, by a successor beside them where they serve and
   memory allows, else in place. The first of a model that fails ends the changes of that model:
   what served keeps serving, or starts again, with its old settings.

A reload is over when all new replicas serve or have failed; removed ones may still be draining.
Reloads run one at a time, and not while values are adapted.

What starts a reload: a command, SIGHUP, or a change of the settings file. A command during a reload
is rejected, as it can be repeated. A signal and a change of the file wait for the reload that runs;
several of them are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Final

from proxy.common.background_tasks import FAILURES, persist
from proxy.nodes.settings import NodeSettings
from supervisor.errors import CorralError, DaemonBusy
from supervisor.events import Emit
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import FileVersion, LaunchFingerprint, ReplicaId
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.replace import Replacer, ReplicaFailure, start_failure
from supervisor.plan.plan import Plan
from supervisor.settings.load import Loaded, restart_changes
from supervisor.settings.schema import ModelSettings, Settings

# Checks the nodes of new settings, raising CorralError; returns what applies them.
PrepareNodes = Callable[[Loaded], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What happens to each replica; every one is in exactly one of the four."""

    added: tuple[ReplicaId, ...]
    removed: tuple[ReplicaId, ...]
    changed: tuple[ReplicaId, ...]
    kept: tuple[ReplicaId, ...]

    @property
    def removed_at_once(self) -> tuple[ReplicaId, ...]:
        """Those whose model has no changed replica; the others serve while those are replaced."""
        changing = {place.model for place in self.changed}
        return tuple(place for place in self.removed if place.model not in changing)

    @property
    def to_plan(self) -> tuple[ReplicaId, ...]:
        """The replicas that get a new process."""
        return (*self.added, *self.changed)

    def only(self, models: Collection[str]) -> Difference:
        """Return what happens to these models while all others stay as they are."""

        def of_models(places: tuple[ReplicaId, ...]) -> tuple[ReplicaId, ...]:
            return tuple(place for place in places if place.model in models)

        others = (place for place in (*self.kept, *self.changed) if place.model not in models)
        return Difference(
            added=of_models(self.added),
            removed=of_models(self.removed),
            changed=of_models(self.changed),
            kept=(*others, *of_models(self.kept)),
        )

    def names(self) -> dict[str, list[str]]:
        return {
            "added": list(map(str, self.added)),
            "removed": list(map(str, self.removed)),
            "changed": list(map(str, self.changed)),
            "kept": list(map(str, self.kept)),
        }


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """New settings that passed every check, with a plan for each new process."""

    loaded: Loaded
    planner: LaunchPlanner
    plans: Mapping[ReplicaId, Plan]
    difference: Difference
    apply_nodes: Callable[[], None]


def prepare(
    replicas: Iterable[Replica],
    read: Callable[[], Loaded],
    make_planner: Callable[[Loaded], LaunchPlanner],
    prepare_nodes: PrepareNodes,
) -> ReloadPlan:
    """Read the settings, compare them with what runs, and plan. Blocks; changes nothing.

    Raises:
        CorralError: The first thing that is wrong.
    """
    loaded = read()
    planner = make_planner(loaded)
    difference = compare(_running_fingerprints(replicas), _wanted_fingerprints(planner))
    plans = {place: planner.plan_at(place) for place in difference.to_plan}
    return ReloadPlan(loaded, planner, plans, difference, prepare_nodes(loaded))


def compare(
    running: Mapping[ReplicaId, LaunchFingerprint | None],
    wanted: Mapping[ReplicaId, LaunchFingerprint],
) -> Difference:
    """Return how to get from one to the other; None differs from every fingerprint."""
    both = [place for place in wanted if place in running]
    return Difference(
        added=tuple(place for place in wanted if place not in running),
        removed=tuple(place for place in running if place not in wanted),
        changed=tuple(place for place in both if running[place] != wanted[place]),
        kept=tuple(place for place in both if running[place] == wanted[place]),
    )


def _running_fingerprints(replicas: Iterable[Replica]) -> dict[ReplicaId, LaunchFingerprint | None]:
    planner_of = cache(LaunchPlanner.reading_once)
    return {
        replica.place: replica.fingerprint
        or _unused_fingerprint(planner_of(replica.planner), replica.place)
        for replica in replicas
    }


def _unused_fingerprint(planner: LaunchPlanner, place: ReplicaId) -> LaunchFingerprint | None:
    """Return the fingerprint of a replica that never ran; None where it could not."""
    try:
        return planner.fingerprint(place, planner.engine_at(place))
    except CorralError:
        return None


def _wanted_fingerprints(planner: LaunchPlanner) -> dict[ReplicaId, LaunchFingerprint]:
    planner = planner.reading_once()
    return {
        place: planner.fingerprint(place, planner.engine_at(place))
        for name in planner.entries
        for place in planner.places.of(name)
    }


def reload_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    """Yield a sentence for each change that no replica shows.

    The proxy keeps what the daemon `began_with`, so `[proxy]` and `[jobs]` are compared with that;
    all but `default_model`, which belongs to the models, and the files of TLS.
    """
    yield from _proxy_notes(began_with, before, after)
    yield from _node_notes(before.nodes, after.nodes)
    if before.supervisor != after.supervisor:
        yield "[supervisor] changed: its limits apply from each instance's next state"
    yield from _hook_notes(before, after)
    for name, model in after.models.items():
        if name in before.models and before.models[name].aliases != model.aliases:
            yield f"{name}: its aliases are now {', '.join(model.aliases) or 'none'}"
        if name in before.models and before.models[name].variants != model.variants:
            yield f"{name}: its variants are now {', '.join(model.variants) or 'none'}"
        if name in before.models and before.models[name].loras != model.loras:
            yield f"{name}: its adapters are now {', '.join(model.loras) or 'none'}"
        if name in before.models and before.models[name].fallback != model.fallback:
            yield f"{name}: its fallback is now {', '.join(model.fallback) or 'none'}"
        yield from _trial_notes(name, before.models.get(name), model)


def _proxy_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    for key, value in restart_changes(began_with, after):
        shown = "unset" if value is None else value
        yield f"{key} stays {shown} until the daemon is restarted"
    if began_with.proxy.tls and after.proxy.tls and before.proxy.tls != after.proxy.tls:
        yield "[proxy.tls] changed: it applies to new connections"
    if before.proxy.default_model != after.proxy.default_model:
        yield f"the default model is now {after.proxy.default_model or 'none'}"


def _hook_notes(before: Settings, after: Settings) -> Iterator[str]:
    if before.hooks != after.hooks:
        yield "[hooks] changed: they apply to what happens from now on"


def _trial_notes(name: str, before: ModelSettings | None, after: ModelSettings) -> Iterator[str]:
    was, now = before.trial if before else None, after.trial
    if now and (was is None or was.share != now.share):
        yield f"{name}: its trial gets {100 * now.share:g} % of new conversations"


def _node_notes(
    before: Mapping[str, NodeSettings], after: Mapping[str, NodeSettings]
) -> Iterator[str]:
    if added := after.keys() - before.keys():
        yield f"new nodes: {', '.join(sorted(added))}"
    if removed := before.keys() - after.keys():
        yield f"removed nodes: {', '.join(sorted(removed))}"
    if changed := {name for name in before.keys() & after.keys() if before[name] != after[name]}:
        yield f"changed nodes: {', '.join(sorted(changed))}"


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
            for model, places in groupby(
                prepared.difference.changed, key=lambda place: place.model
            ):
                failures += await self._replace_all(places, prepared)
                self._retire(place for place in prepared.difference.removed if place.model == model)
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


_CHECK_EVERY_S: Final = 2.0

Work = Callable[[], Awaitable[ReloadResult | CorralError]]


class ReloadTriggers:
    """Runs reloads while it is served; `applying` is open while one is applied."""

    def __init__(
        self,
        reload: Reload,
        applying: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._reload = reload
        self._applying = applying
        self._check_every_s = check_every_s
        self._file_version = self._current_version()
        self._is_scheduled = False
        self._woken = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def start(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload, or a dry run of one; it is cancelled when serving ends.

        Raises:
            DaemonBusy: A reload runs already, or the daemon is stopping.
        """
        if self._reload.is_busy and self._group:
            raise DaemonBusy("a reload is already running", hint="retry when it is over")
        return self._begin(lambda: self._run(dry_run=dry_run))

    def add(self, models: Mapping[str, ModelSettings]) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin to serve further models, after a reload that runs; otherwise as `start`."""
        return self._begin(lambda: self._reload.add(models))

    def schedule(self) -> None:
        """Reload as soon as no other reload runs."""
        self._is_scheduled = True
        self._woken.set()

    async def serve(self) -> None:
        """Run reloads until cancelled; a reload that runs then stops where it is."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await persist("reload", self._watch)
            finally:
                self._group = None

    def _begin(self, work: Work) -> asyncio.Task[ReloadResult | CorralError]:
        if self._group is None:
            raise DaemonBusy("the daemon is stopping", hint="corral start starts another")
        return self._group.create_task(self._run_for_command(work), name="reload")

    async def _run_for_command(self, work: Work) -> ReloadResult | CorralError:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("reload", error)
            return CorralError(f"the reload failed: {error!r}", hint="corral logs shows where")

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_every_s if self._watches_file else None):
                    await self._woken.wait()
            self._woken.clear()
            is_changed = self._watches_file and self._current_version() != self._file_version
            if self._is_scheduled or is_changed:
                self._is_scheduled = False
                await self._run(dry_run=False)

    async def _run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        if not dry_run:
            self._file_version = self._current_version()
        try:
            with nullcontext() if dry_run else self._applying():
                return await self._reload.run(dry_run=dry_run)
        finally:
            self._woken.set()  # watch_settings may have changed

    @property
    def _watches_file(self) -> bool:
        return self._reload.loaded.settings.supervisor.watch_settings

    def _current_version(self) -> FileVersion | None:
        path = self._reload.loaded.path
        return FileVersion.of(path) if path else None
