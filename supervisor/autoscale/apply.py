"""Samples demand and machine, has deciders decide, and applies the values that they want.

Values change by replacing the instances of a model, each by a successor beside it, so that no
request is cut and the model never stops. If memory does not hold both, or a successor fails, the
other instances stay as they are; a failed replacement is tried again after growing pauses. The
values of the first successor apply to every later start of the model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from attrs import define, field

from proxy.common.background_tasks import FAILURES
from supervisor.autoscale.slots import Change, Decider, ModelView
from supervisor.engine.states import WITHOUT_PROCESS, State
from supervisor.errors import CorralError
from supervisor.events import Emit, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.replace import Replacer, ReplicaFailure, serves, successor_bytes
from supervisor.loading.memory_usage import HOST, MemoryUsage, fits
from supervisor.plan.plan import Plan
from supervisor.plan.setting import SettingsByFlag, values

if TYPE_CHECKING:
    from proxy.router.router import Router


def merge_changes(adapted: SettingsByFlag, changes: Iterable[Change]) -> SettingsByFlag:
    after = dict(adapted)
    for change in changes:
        after.pop(change.key, None)
        if change.to is not None:
            after[change.key] = change.to
    return after


def _plans(planner: LaunchPlanner, places: Iterable[ReplicaId]) -> list[Plan]:
    return [planner.plan_at(place) for place in places]


def _runs(replica: Replica, plan: Plan) -> bool:
    before = replica.plan
    return before is not None and before.memory_inputs.chosen == plan.memory_inputs.chosen


_SAMPLE_S: Final = 5.0
_RETRY_FIRST_S: Final = 60.0
_RETRY_MAX_S: Final = 3600.0


@define(eq=False, slots=False)
class AdaptiveController(Part):
    """Applies the deciders' changes to loaded models; replaces nothing if `is_memory_wanted`.

    `adapted` gets the applied values by model.
    """

    task = "adaptive"
    serves_until = "drain"

    _fleet: Fleet
    _router: Router
    _replacer: Replacer
    _memory_usage: MemoryUsage
    _adapted: dict[str, SettingsByFlag]
    _emit: Emit
    _deciders: Sequence[Decider]
    _is_memory_wanted: Callable[[], bool]
    _clock: Callable[[], float] = time.monotonic
    _planner: LaunchPlanner | None = field(default=None, init=False)
    # The plan that runs and the one without adapted values, made once per run; None if there
    # is no such plan.
    _bases: dict[str, tuple[Plan, Plan | None]] = field(factory=dict, init=False)
    # The number of failures of each model, and the earliest time of its next change.
    _retries: dict[str, tuple[int, float]] = field(factory=dict, init=False)
    _applying: asyncio.Task[None] | None = field(default=None, init=False)

    async def serve(self) -> None:
        """Sample and change until cancelled, which also cancels a running replacement."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._sample_s())
                wanted = self.sample()
                if wanted and (self._applying is None or self._applying.done()):
                    self._applying = group.create_task(self.change(*wanted), name="adapt")

    async def change(self, view: ModelView, changes: Sequence[Change]) -> None:
        try:
            problem = await self._apply(view.name, changes)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("adaptive", error)
            problem = repr(error)
        if problem is None:
            # A replacement loses the prompts of busy slots, so the next replacement has to wait.
            calm_s = view.settings.slots.queued_s
            self._retries[view.name] = 0, self._clock() + calm_s
        else:
            self._note_failure(view, changes, problem)

    def _note_failure(self, view: ModelView, changes: Sequence[Change], problem: str) -> None:
        """Try again later, after growing pauses."""
        before, at_s = self._retries.get(view.name, (0, float("-inf")))
        failures = before + 1 if self._clock() - at_s < _RETRY_MAX_S else 1
        retry_in_s = min(_RETRY_MAX_S, _RETRY_FIRST_S * 2 ** (failures - 1))
        self._retries[view.name] = failures, self._clock() + retry_in_s
        planned, chosen = view.base.memory_inputs.chosen, view.plan.memory_inputs.chosen
        for change in changes:
            self._emit(
                "model.adapt_failed",
                model=view.name,
                key=change.key,
                before=chosen.get(change.key),
                after=change.to.value if change.to else planned.get(change.key),
                reason=problem,
                retry_in_s=retry_in_s,
            )

    # Changes.

    async def _apply(self, name: str, changes: Sequence[Change]) -> str | None:
        """Apply changes; return why not, or None. Not during a reload: they may be obsolete."""
        if self._replacer.lock.locked():
            return None
        async with self._replacer.lock:
            model = self._fleet.models.get(name)
            if model is None or not model.is_configured:
                return None
            to = merge_changes(self._adapted.get(name, {}), changes)
            planner, replicas = self._fleet.planner.adapting(name, to), model.replicas
            try:
                plans = await asyncio.to_thread(
                    _plans, planner, [replica.place for replica in replicas]
                )
            except CorralError as error:
                return error.message
            planned = [*zip(replicas, plans, strict=True)]
            if all(_runs(old, plan) for old, plan in planned):
                self._adapted[name] = plans[0].adapted
                return "memory does not hold more" if changes else None
            return await self._replace_all(changes, planner, planned)

    async def _replace_all(
        self,
        changes: Sequence[Change],
        planner: LaunchPlanner,
        planned: Iterable[tuple[Replica, Plan]],
    ) -> str | None:
        news = list(changes)
        for old, plan in planned:
            if _runs(old, plan):
                continue
            problem = await self._replace(old, planner, plan)
            if problem is not None:
                return problem or None
            self._commit(news, old, plan)
            news = []
            self._fleet.apply_settings(
                self._fleet.models[old.place.model].at(old.place.number), self._fleet.planner
            )
        return None

    async def _replace(self, old: Replica, planner: LaunchPlanner, plan: Plan) -> str | None:
        """Return why it was not replaced; an empty text if it should no longer serve."""
        devices = {name: taken.total for name, taken in plan.estimate.devices.items()}
        required = {HOST: successor_bytes(old, plan) or 0, **devices}
        if not fits(required, self._memory_usage.free()):
            return f"memory does not hold a successor beside {old.name}"
        done = await self._replacer.replace_beside(old, planner, plan)
        if isinstance(done, ReplicaFailure):
            return f"{old.name} was not replaced: {done.reason}"
        if done:
            return None
        is_wanted = serves(old.instance.snapshot())
        return f"memory does not hold a successor beside {old.name}" if is_wanted else ""

    def _commit(self, changes: Iterable[Change], old: Replica, plan: Plan) -> None:
        self._adapted[plan.model] = plan.adapted
        before = old.plan.memory_inputs.chosen if old.plan else {}
        after = plan.memory_inputs.chosen
        for change in changes:
            self._emit(
                "model.adapted",
                model=plan.model,
                key=change.key,
                before=before.get(change.key),
                after=after.get(change.key),
                reason=change.reason,
            )

    # Decisions. Nothing here waits.

    def _sample_s(self) -> float:
        models = self._fleet.planner.entries
        settings = [self._fleet.planner.model_settings(name).slots for name in models]
        return min([_SAMPLE_S, *(slots.sample_s for slots in settings if slots.follow_demand)])

    def sample(self) -> tuple[ModelView, Sequence[Change]] | None:
        """Sample; return a model to change now, with its changes."""
        if not self._fleet.planner.supervisor.adaptive:
            return None
        self._forget()
        views = [view for model in self._fleet.models.values() if (view := self._view(model))]
        for decider in self._deciders:
            decider.sample(views)
        if self._is_memory_wanted():
            return None
        wanted = ((view, self._changes(view)) for view in views if self._may_change(view))
        return next(((view, changes) for view, changes in wanted if changes is not None), None)

    def _changes(self, view: ModelView) -> Sequence[Change] | None:
        """Return the changes to apply now, none to complete an earlier one; None for nothing."""
        changes = [change for decider in self._deciders for change in decider.changes(view)]
        if not view.is_idle and not any(change.is_urgent for change in changes):
            return None
        return changes if changes or self._is_uneven(view.name) else None

    def _forget(self) -> None:
        """Drop the adapted values of models that were unloaded or whose instance failed."""
        if self._planner is not self._fleet.planner:
            self._planner, self._bases, self._retries = self._fleet.planner, {}, {}
        for name in tuple(self._adapted):
            model = self._fleet.models.get(name)
            if model is None or any(
                (replica.instance.snapshot().state in WITHOUT_PROCESS) for replica in model.replicas
            ):
                del self._adapted[name]

    def _view(self, model: Model) -> ModelView | None:
        name, replicas = model.entry.name, model.replicas
        snapshots = [replica.instance.snapshot() for replica in replicas]
        if not replicas or any(snapshot.state is not State.READY for snapshot in snapshots):
            return None
        plan = replicas[0].plan
        base = self._base_plan(name, plan) if plan else None
        if plan is None or base is None:
            return None
        demand = self._router.demand(name)
        return ModelView(
            name=name,
            at_s=self._clock(),
            waiting=demand.waiting - demand.held_back,
            busy=demand.working,
            instances={snapshot.name: snapshot.pid or 0 for snapshot in snapshots},
            plan=plan,
            base=base,
            settings=self._fleet.planner.model_settings(name),
        )

    def _base_plan(self, model: str, runs: Plan) -> Plan | None:
        if model not in self._bases or self._bases[model][0] is not runs:
            base: Plan | None = None
            with suppress(CorralError):  # its next start reports the error
                base = self._fleet.planner.adapting(model, {}).plan(model)
            self._bases[model] = runs, base
        return self._bases[model][1]

    def _may_change(self, view: ModelView) -> bool:
        model = self._fleet.models[view.name]
        _, not_before_s = self._retries.get(view.name, (0, float("-inf")))
        return not (model.replacements or model.retiring) and not_before_s <= view.at_s

    def _is_uneven(self, name: str) -> bool:
        """Return whether an instance lacks the adapted values, because its replacement failed."""
        wanted, trial_at = values(self._adapted.get(name, {})), self._fleet.planner.trial_at
        replicas = self._fleet.models[name].replicas
        plans = [replica.plan for replica in replicas if trial_at(replica.place) is None]
        return any(plan and values(plan.adapted) != wanted for plan in plans)
