"""Reload by difference: new settings come to what runs, and only to what they change.

First everything that can be found wrong is found, before anything is touched (prepare.py). Then

1. replicas that are kept take the new settings for their next run, and go on as they are;
2. those that are no longer set drain and leave;
3. those that are new start;
4. those that are changed are replaced one after another: new first where they serve and memory
   allows, else in place. The first of a model that fails ends the changes of that model, and what
   served under the old settings goes on, or comes back, under those.

It is over when all that is new serves or has failed; who leaves may take as long as a drain may.
One reload runs at a time; whoever asks for one meanwhile waits here for his turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

from supervisor.errors import CorralError, SettingsInvalid
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.fleet.fleet import START_OVER, Fleet
from supervisor.fleet.launch_id import ReplicaId
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.process_memory import own_bytes
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.states import State
from supervisor.process.exit_cause import FailureCause
from supervisor.reload.diff import Difference, reload_notes
from supervisor.reload.prepare import ExtraCheck, ReloadPlan, prepare
from supervisor.reload.strategy import ReplaceStrategy, fits, need_bytes, serves, strategy_for
from supervisor.settings.load import Loaded

_BEGUN: Final = frozenset(State) - {State.STOPPED}
# Causes that a successor meets only because who it follows still holds its memory.
_SHORT_OF_MEMORY: Final = frozenset({"device_memory", "host_memory"})


@dataclass(frozen=True, slots=True)
class ReloadFailure:
    """A replica that did not come up as the new settings have it.

    Attributes:
        place: The replica.
        cause: Why; None where that is not known.
        log_path: The log that tells more, or None.
        stays: Whether it serves under its old settings, or is about to again.
    """

    place: ReplicaId
    cause: FailureCause | None
    log_path: Path | None
    stays: bool

    def __str__(self) -> str:
        reason = self.cause.sentence if self.cause else "it did not start"
        return f"{self.place}: {reason}" + ("; it keeps its old settings" if self.stays else "")


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """What came, or would come, of a reload.

    Attributes:
        difference: What became of each replica; of those changed, some may have failed.
        notes: Sentences a person should read.
        failures: Replicas that did not come up; none in a dry run.
    """

    difference: Difference
    notes: tuple[str, ...]
    failures: tuple[ReloadFailure, ...] = ()


class Reload:
    """Takes new settings in, one set at a time.

    Args:
        fleet: What runs.
        loaded: The settings it was started with.
        read: Reads the same sources again; raises CorralError. Called in a thread.
        make_planner: Makes a workshop of settings.
        beside: Prepares what is not a model's.
        emit: Where events go.
        read_machine: Tells how much memory there is.

    Attributes:
        loaded: The settings that were taken in last.
    """

    def __init__(  # noqa: PLR0913 (each is a seam of its own)
        self,
        fleet: Fleet,
        loaded: Loaded,
        *,
        read: Callable[[], Loaded],
        make_planner: Callable[[Loaded], LaunchPlanner],
        beside: ExtraCheck,
        emit: Emit,
        read_machine: Callable[[], Machine] = machine.read,
    ) -> None:
        self.loaded = loaded
        self._began_with = loaded.settings
        self._fleet = fleet
        self._read = read
        self._make_planner = make_planner
        self._beside = beside
        self._emit = emit
        self._read_machine = read_machine
        self._turn = asyncio.Lock()

    @property
    def is_busy(self) -> bool:
        """Return whether a reload is under way."""
        return self._turn.locked()

    async def run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        """Reload, or find out what a reload would do.

        Returns:
            What came of it, or why nothing was changed. An error is a value here, because nobody
            may be there to catch one.
        """
        async with self._turn:
            try:
                prepared = await asyncio.to_thread(
                    prepare,
                    self._fleet.replicas(),
                    self._read_again,
                    self._make_planner,
                    self._beside,
                )
            except CorralError as error:
                if not dry_run:
                    self._emit("settings.rejected", reason=error.message)
                return error
            notes = tuple(
                reload_notes(self._began_with, self.loaded.settings, prepared.loaded.settings)
            )
            if dry_run:
                return ReloadResult(prepared.difference, notes)
            done = ReloadResult(prepared.difference, notes, await self._perform(prepared))
            self._tell(done)
            return done

    def _read_again(self) -> Loaded:
        if self.loaded.path is None:
            raise SettingsInvalid(
                "there is nothing to reload: the daemon was started without a settings file",
                hint="corral stop, then corral start with a corral.toml",
            )
        return self._read()

    async def _perform(self, prepared: ReloadPlan) -> tuple[ReloadFailure, ...]:
        failures = []
        async with asyncio.TaskGroup() as group:
            starts = [group.create_task(_started(replica)) for replica in self._begin(prepared)]
            for _, places in groupby(prepared.difference.changed, key=lambda place: place.model):
                failures += await self._change_all(places, prepared)
        return (*failures, *(failure for start in starts if (failure := start.result())))

    def _begin(self, prepared: ReloadPlan) -> list[Replica]:
        """Do all that needs no waiting; return the replicas that were started."""
        difference, planner, fleet = prepared.difference, prepared.planner, self._fleet
        self.loaded = prepared.loaded
        prepared.take_in()
        fleet.set_planner(planner)
        for place in difference.removed:
            fleet.retire(fleet.models[place.model].at(place.number))
        for place in difference.kept:
            fleet.apply_settings(fleet.models[place.model].at(place.number), planner)
        models = fleet.models.items()
        up = {name for name, model in models if model.is_wanted or not model.is_configured}
        fresh = [fleet.add(place, planner) for place in difference.added]
        begun = [replica for replica in fresh if replica.place.model in up]
        for replica in begun:
            replica.instance.start()
        return begun

    async def _change_all(
        self, places: Iterable[ReplicaId], prepared: ReloadPlan
    ) -> list[ReloadFailure]:
        """Change the replicas of one model, up to the first that fails."""
        for place in places:
            replica = self._fleet.models[place.model].at(place.number)
            failure = await self._change(replica, prepared)
            if failure:
                return [failure]
        return []

    async def _change(self, replica: Replica, prepared: ReloadPlan) -> ReloadFailure | None:
        planner, after = prepared.planner, prepared.plans[replica.place.model]
        match strategy_for(replica.instance.snapshot(), has_room=self._has_room(replica, after)):
            case ReplaceStrategy.ON_NEXT_START:
                self._fleet.apply_settings(replica, planner)
                return None
            case ReplaceStrategy.RESTART:
                return await self._change_in_place(replica, planner)
            case ReplaceStrategy.ROLLING:
                return await self._change_new_first(replica, planner)

    async def _change_new_first(self, old: Replica, planner: LaunchPlanner) -> ReloadFailure | None:
        new = self._fleet.add_beside(old, planner)
        new.instance.start()
        facts = await _settled(new)
        if facts.state is State.READY:
            self._fleet.replace(old, new)
            return None
        self._fleet.retire(new)
        if not facts.wanted:  # somebody stopped the model meanwhile
            self._fleet.apply_settings(old, planner)
            return None
        if facts.cause and facts.cause.code in _SHORT_OF_MEMORY:
            return await self._change_in_place(old, planner)
        return ReloadFailure(old.place, facts.cause, facts.log_path, stays=True)

    async def _change_in_place(
        self, replica: Replica, planner: LaunchPlanner
    ) -> ReloadFailure | None:
        before, served = replica.planner, serves(replica.instance.snapshot())
        self._fleet.apply_settings(replica, planner)
        replica.instance.restart()
        facts = await replica.instance.wait(START_OVER)
        if facts.state is State.READY or not facts.wanted:
            return None
        if served:
            self._fleet.apply_settings(replica, before)
            replica.instance.start()
        return ReloadFailure(replica.place, facts.cause, facts.log_path, stays=served)

    def _has_room(self, replica: Replica, after: Plan) -> bool:
        pid = replica.instance.snapshot().pid
        own = own_bytes(pid) if pid else None
        if own is None or replica.plan is None:
            return True
        here = self._read_machine()
        return fits(
            need_bytes(own, replica.plan, after),
            available_bytes=here.memory_available_bytes,
            memory_bytes=here.memory_bytes,
        )

    def _tell(self, done: ReloadResult) -> None:
        places = done.difference
        self._emit(
            "settings.reloaded",
            added=[str(place) for place in places.added],
            removed=[str(place) for place in places.removed],
            changed=[str(place) for place in places.changed],
            kept=[str(place) for place in places.kept],
            notes=[*done.notes, *map(str, done.failures)],
        )


async def _started(replica: Replica) -> ReloadFailure | None:
    facts = await _settled(replica)
    if facts.state is State.READY or not facts.wanted:
        return None
    return ReloadFailure(replica.place, facts.cause, facts.log_path, stays=False)


async def _settled(replica: Replica) -> InstanceSnapshot:
    """Wait until a replica that was started just now serves, or has failed once.

    It is STOPPED until its own task has taken the command in. The limits of its states are the
    deadline.
    """
    await replica.instance.wait(_BEGUN)
    return await replica.instance.wait(START_OVER)
