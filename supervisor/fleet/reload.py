"""Applies new settings to running instances, and only those that they change.

All errors are found before anything is changed (`Reload._apply`). Then

1. unchanged replicas keep running, and use the new settings in their next run;
2. removed replicas drain and stop; in a model with changed replicas, after these changes;
3. added replicas start, unless their model is new and has no `preload`;
4. changed replicas are replaced one after another: by a successor beside them if they serve and
   memory allows it, otherwise in place. The first failure in a model ends the changes of that
   model: the replica that served keeps serving, or starts again, with its old settings.

Launch fingerprints are compared, not command lines: those also depend on the number of instances
that share the machine, so an added model would restart all others to change a thread each.

A reload is over when all new replicas serve or have failed; removed ones may still be draining.
Reloads run one at a time, and not while values are adapted. A command, SIGHUP, or a change of the
settings file starts one. A command during a reload is rejected, as it can be repeated. A signal or
a change of the file waits for the running reload; several of them start one reload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, Final, Protocol

from attrs import define, field

from proxy.common.background_tasks import FAILURES, persist
from proxy.nodes.settings import NodeSettings
from supervisor.errors import CorralError, DaemonBusy
from supervisor.events import Emit
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import FileVersion, LaunchFingerprint, ReplicaId, version_of
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.replace import Replacer, ReplicaFailure, start_failure
from supervisor.plan.plan import Plan
from supervisor.settings.load import Loaded, changed_model, restart_changes
from supervisor.settings.schema import ModelSettings, Settings

# Checks a part of new settings, raising CorralError; returns the function that applies it.
Prepare = Callable[[Loaded], Callable[[], None]]
Plans = Mapping[ReplicaId, Plan]


class Reread(Protocol):
    """Reads the sources of the settings again, in a thread; raises CorralError."""

    def __call__(self, content: bytes | None = None, /) -> Loaded:
        """Return the settings, with a content in place of the file's if there is one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The change of each replica, which is in exactly one of the four."""

    added: tuple[ReplicaId, ...]
    removed: tuple[ReplicaId, ...]
    changed: tuple[ReplicaId, ...]
    kept: tuple[ReplicaId, ...]

    @property
    def removed_at_once(self) -> tuple[ReplicaId, ...]:
        """Those whose model has no changed replica; the others serve during the replacements."""
        changing = {place.model for place in self.changed}
        return tuple(place for place in self.removed if place.model not in changing)

    def names(self) -> dict[str, list[str]]:
        kinds = ("added", "removed", "changed", "kept")
        return {kind: list(map(str, getattr(self, kind))) for kind in kinds}


def compare(
    running: Mapping[ReplicaId, LaunchFingerprint | None],
    wanted: Mapping[ReplicaId, LaunchFingerprint],
    only: Collection[str] | None = None,
) -> Difference:
    """Return the changes from `running` to `wanted`; None differs from every fingerprint.

    If `only` is given, other models are not changed.
    """

    def of_models(places: Iterable[ReplicaId]) -> tuple[ReplicaId, ...]:
        return tuple(place for place in places if only is None or place.model in only)

    both = [place for place in wanted if place in running]
    changed = of_models(place for place in both if running[place] != wanted[place])
    return Difference(
        added=of_models(place for place in wanted if place not in running),
        removed=of_models(place for place in running if place not in wanted),
        changed=changed,
        kept=tuple(place for place in both if place not in changed),
    )


def _running_fingerprints(replicas: Sequence[Replica]) -> dict[ReplicaId, LaunchFingerprint | None]:
    planner_of = cache(LaunchPlanner.reading_once)
    found = {replica.place: replica.fingerprint for replica in replicas}
    for replica in replicas:
        if replica.fingerprint is None:  # it never ran
            with suppress(CorralError):  # it could not run
                planner, place = planner_of(replica.planner), replica.place
                found[place] = planner.fingerprint(place, planner.engine_at(place))
    return found


def _wanted_fingerprints(planner: LaunchPlanner) -> dict[ReplicaId, LaunchFingerprint]:
    planner = planner.reading_once()
    return {
        place: planner.fingerprint(place, planner.engine_at(place))
        for name in planner.entries
        for place in planner.replicas_of(name)
    }


def reload_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    """Yield a sentence for each change that is not a change of replicas.

    The proxy keeps the settings that the daemon `began_with`, so `[proxy]` and `[jobs]` are
    compared with these, except `default_model`, `prompt_rules` and the files of TLS.
    """
    yield from _proxy_notes(began_with, before, after)
    yield from _node_notes(before.nodes, after.nodes)
    if before.supervisor != after.supervisor:
        yield "[supervisor] changed: its limits apply from each instance's next state"
    if before.hooks != after.hooks:
        yield "[hooks] changed: they apply to later events"
    for name, model in after.models.items():
        yield from _model_notes(name, before.models.get(name), model)


_MODEL_LISTS: Final = (
    ("aliases", "aliases are"),
    ("variants", "variants are"),
    ("loras", "adapters are"),
    ("fallback", "fallback is"),
)


def _model_notes(name: str, before: ModelSettings | None, after: ModelSettings) -> Iterator[str]:
    if before:
        for key, text in _MODEL_LISTS:
            if getattr(before, key) != (found := getattr(after, key)):
                yield f"{name}: its {text} now {', '.join(found) or 'none'}"
    was, now = before.trial if before else None, after.trial
    if now and (was is None or was.share != now.share):
        yield f"{name}: its trial gets {100 * now.share:g} % of new conversations"


def _proxy_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    for key, value in restart_changes(began_with, after):
        shown = "unset" if value is None else value
        yield f"{key} stays {shown} until the daemon is restarted"
    if began_with.proxy.tls and after.proxy.tls and before.proxy.tls != after.proxy.tls:
        yield "[proxy.tls] changed: it applies to new connections"
    if before.proxy.default_model != after.proxy.default_model:
        yield f"the default model is now {after.proxy.default_model or 'none'}"
    if before.proxy.prompt_rules != (rules := after.proxy.prompt_rules):
        yield f"clients with prompt rules are now {', '.join(rules) or 'none'}"


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


_CHECK_EVERY_S: Final = 2.0

Work = Callable[[], Awaitable[ReloadResult | CorralError]]


@define(eq=False, slots=False)
class Reload:
    """Applies new settings; `loaded` are those that were applied last.

    `read` reads the same sources again. `prepares` check and apply all settings but those of
    replicas. The context `applying` is open while settings are applied. `serve` runs the reloads of
    commands, signals and a changed file.
    """

    _fleet: Fleet
    loaded: Loaded
    _read: Reread
    _make_planner: Callable[[Loaded], LaunchPlanner]
    _prepares: Sequence[Prepare]
    _emit: Emit
    _replacer: Replacer
    _applying: Callable[[], AbstractContextManager[None]] = nullcontext
    _added: dict[str, ModelSettings] = field(factory=dict, init=False)
    _changed: dict[str, ModelSettings] = field(factory=dict, init=False)
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _is_scheduled: bool = field(default=False, init=False)
    _woken: asyncio.Event = field(factory=asyncio.Event, init=False)
    _group: asyncio.TaskGroup | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._began_with = self.loaded.settings
        self._file_version = self._current_version()

    @property
    def settings(self) -> Settings:
        """The current settings; a reload replaces them."""
        return self.loaded.settings

    def start(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload or a dry run. Raises DaemonBusy: one is running, or serving ends."""
        if self._lock.locked() and self._group:
            raise DaemonBusy("a reload is already running", hint="retry when it is over")
        return self._begin_task(lambda: self.run(dry_run=dry_run))

    def add(self, models: Mapping[str, ModelSettings]) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin to serve more models until the daemon ends, after a running reload.

        The settings are not read again. Later reloads keep these models, unless the settings file
        has a model of the same name. Raises as `start`.
        """
        keep = partial(self._added.update, models)
        return self._begin_task(
            lambda: self._apply_now(lambda: self.loaded.with_models(models), lambda _: keep, models)
        )

    def change(
        self, changes: Mapping[str, ModelSettings]
    ) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin to change models until the daemon ends, after a running reload; otherwise as `add`.

        Later reloads keep the changes.
        """

        def keep() -> None:
            for name, change in changes.items():
                self._changed[name] = changed_model(self._changed.get(name, change), change)

        return self._begin_task(
            lambda: self._apply_now(
                lambda: self.loaded.with_changes(changes), lambda _: keep, changes
            )
        )

    def changes(self, model: str) -> dict[str, Any]:
        """Return the settings of a model that `change` has given, as in `[models.NAME]`."""
        found = self._changed.get(model)
        given = found.model_fields_set - {"path"} if found else set()
        return found.model_dump(include=given) if found else {}

    def schedule(self) -> None:
        self._is_scheduled = True
        self._woken.set()

    async def serve(self) -> None:
        """Run reloads until cancelled, which also cancels a running reload."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await persist("reload", self._watch)
            finally:
                self._group = None

    def _begin_task(self, work: Work) -> asyncio.Task[ReloadResult | CorralError]:
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
                async with asyncio.timeout(_CHECK_EVERY_S if self._watches_file else None):
                    await self._woken.wait()
            self._woken.clear()
            is_changed = self._watches_file and self._current_version() != self._file_version
            if self._is_scheduled or is_changed:
                self._is_scheduled = False
                await self.run(dry_run=False)

    async def run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        """Reload, or return the changes that a reload would make.

        If it returns an error, nothing was changed. The error is not raised, because a signal or a
        change of the file has no caller that could handle it.
        """
        if dry_run:
            return await self._apply(self._read_again, self._prepares, dry_run=True)
        self._file_version = self._current_version()
        try:
            with self._applying():
                done = await self._apply(self._read_again, self._prepares)
        finally:
            self._woken.set()  # watch_settings may have changed
        if isinstance(done, CorralError):
            self._emit("settings.rejected", reason=done.message)
        else:
            self._report(done)
        return done

    async def preview(self, content: bytes, check: Prepare) -> ReloadResult | CorralError:
        """Return the changes that a reload would make with another content of the settings file."""
        return await self._apply(
            lambda: self._read_again(content), [*self._prepares, check], dry_run=True
        )

    async def replan(self, model: str) -> ReloadResult | CorralError:
        """Apply the present plan of one model; the settings are not read again."""
        return await self._apply(lambda: self.loaded, (), only=[model])

    async def _apply_now(
        self, read: Callable[[], Loaded], prepare: Prepare, only: Collection[str]
    ) -> ReloadResult | CorralError:
        done = await self._apply(read, [prepare], only=only)
        if isinstance(done, ReloadResult):
            self._report(done)
        return done

    async def _apply(
        self,
        read: Callable[[], Loaded],
        prepares: Sequence[Prepare],
        *,
        only: Collection[str] | None = None,
        dry_run: bool = False,
    ) -> ReloadResult | CorralError:
        async with self._lock, self._replacer.lock:
            running = self._fleet.replicas()

            def prepare() -> tuple[
                Loaded, LaunchPlanner, Difference, Plans, list[Callable[[], None]]
            ]:
                """Read, check and compare the settings, and plan each new process."""
                loaded = read()
                planner = self._make_planner(loaded)
                difference = compare(
                    _running_fingerprints(running), _wanted_fingerprints(planner), only
                )
                new = (*difference.added, *difference.changed)
                plans = {place: planner.plan_at(place) for place in new}
                return loaded, planner, difference, plans, [part(loaded) for part in prepares]

            try:
                loaded, planner, difference, plans, applies = await asyncio.to_thread(prepare)
            except CorralError as error:
                return error
            before, after = self.loaded.settings, loaded.settings
            notes = () if only else tuple(reload_notes(self._began_with, before, after))
            if dry_run:
                return ReloadResult(difference, notes)
            self.loaded = loaded
            for apply in applies:
                apply()
            return ReloadResult(difference, notes, await self._perform(difference, planner, plans))

    def _read_again(self, content: bytes | None = None) -> Loaded:
        """Read the settings. Without a file they stay, but changes such as a new engine apply."""
        if not self.loaded.path:
            return self.loaded
        return self._read(content).with_models(self._added).with_changes(self._changed)

    async def _perform(
        self, difference: Difference, planner: LaunchPlanner, plans: Plans
    ) -> tuple[ReplicaFailure, ...]:
        failures: list[ReplicaFailure] = []
        async with asyncio.TaskGroup() as group:
            begun = self._begin(difference, planner)
            starts = [group.create_task(start_failure(replica)) for replica in begun]
            for model, places in groupby(difference.changed, key=lambda place: place.model):
                for place in places:
                    replica = self._at(place)
                    failure = await self._replacer.replace(replica, planner, plans[place])
                    if failure:
                        failures.append(failure)
                        break
                self._retire(place for place in difference.removed if place.model == model)
        return (*failures, *filter(None, (start.result() for start in starts)))

    def _begin(self, difference: Difference, planner: LaunchPlanner) -> list[Replica]:
        """Apply all changes that need no waiting; return the replicas that were started."""
        fleet = self._fleet
        fleet.set_planner(planner)
        self._retire(difference.removed_at_once)
        for place in difference.kept:
            fleet.apply_settings(self._at(place), planner)
        # A new model starts as at a start of the daemon; others if they are wanted now.
        wanted = {
            name
            for name, model in fleet.models.items()
            if (model.is_wanted if model.is_configured else model.residency.preload)
        }
        added = [fleet.add(place, planner) for place in difference.added]
        started = [replica for replica in added if replica.place.model in wanted]
        for replica in started:
            replica.instance.start()
        return started

    def _retire(self, places: Iterable[ReplicaId]) -> None:
        for place in places:
            self._fleet.retire(self._at(place))

    def _at(self, place: ReplicaId) -> Replica:
        return self._fleet.models[place.model].at(place.number)

    def _report(self, done: ReloadResult) -> None:
        notes = [*done.notes, *map(str, done.failures)]
        self._emit("settings.reloaded", **done.difference.names(), notes=notes)

    @property
    def _watches_file(self) -> bool:
        return self.settings.supervisor.watch_settings

    def _current_version(self) -> FileVersion | None:
        return version_of(self.loaded.path) if self.loaded.path else None
