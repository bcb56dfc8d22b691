"""Samples demand and machine, has deciders decide, and applies what they want.

Values change by replacing the instances of a model, a successor beside each, so that no request is
cut and the model never stops. Where memory does not hold both, nothing happens. A replacement that
fails changes nothing either, and is tried again later and later.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from proxy.failures import FAILURES
from proxy.router.model_demand import ModelDemand
from supervisor.adaptive.apply import ChangeApplier
from supervisor.adaptive.base_plans import BasePlans
from supervisor.adaptive.change import Change, Decider, ModelView
from supervisor.adaptive.values import AdaptedValues
from supervisor.events import Emit
from supervisor.flags.setting import values
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model, Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.instance.states import State

_SAMPLE_S: Final = 5.0
_RETRY_FIRST_S: Final = 60.0
_RETRY_MAX_S: Final = 3600.0
_ENDED: Final = frozenset({State.STOPPED, State.BACKOFF, State.FAILED})


class DemandSource(Protocol):
    """The part of proxy.router.router.Router that adapting needs."""

    def demand(self, model: str, /) -> ModelDemand: ...


@dataclass(frozen=True, slots=True)
class _Retry:
    """When a model is changed again, at the earliest."""

    failures: int
    at_s: float


class AdaptiveController:
    """Keeps the values of loaded models as the deciders want them.

    Args:
        is_memory_wanted: Whether a model waits for memory; then nothing is replaced.
    """

    def __init__(  # noqa: PLR0913 (independent collaborators)
        self,
        fleet: Fleet,
        router: DemandSource,
        applier: ChangeApplier,
        adapted: AdaptedValues,
        emit: Emit,
        deciders: Sequence[Decider],
        *,
        is_memory_wanted: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._applier = applier
        self._adapted = adapted
        self._emit = emit
        self._deciders = deciders
        self._is_memory_wanted = is_memory_wanted
        self._clock = clock
        self._planner: LaunchPlanner | None = None
        self._bases = BasePlans()
        self._retries: dict[str, _Retry] = {}
        self._applying: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Sample and change until cancelled; a replacement that runs then stops where it is."""
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._sample_s())
                wanted = self.sample()
                if wanted and (self._applying is None or self._applying.done()):
                    self._applying = group.create_task(self.change(*wanted), name="adapt")

    async def change(self, view: ModelView, changes: Sequence[Change]) -> None:
        try:
            problem = await self._applier.apply(view.name, changes)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("adaptive", error)
            problem = repr(error)
        if problem is None:
            # Each replacement loses prompts of busy slots, so two do not follow each other at once.
            calm_s = view.settings.slots.queued_s
            self._retries[view.name] = _Retry(0, self._clock() + calm_s)
        else:
            self._failed(view, changes, problem)

    def _failed(self, view: ModelView, changes: Sequence[Change], problem: str) -> None:
        """Try again later, and later each time."""
        before = self._retries.get(view.name)
        is_again = before is not None and self._clock() - before.at_s < _RETRY_MAX_S
        failures = before.failures + 1 if before and is_again else 1
        retry_in_s = min(_RETRY_MAX_S, _RETRY_FIRST_S * 2 ** (failures - 1))
        self._retries[view.name] = _Retry(failures, self._clock() + retry_in_s)
        for one in changes:
            self._emit(
                "model.adapt_failed",
                model=view.name,
                key=one.key,
                before=view.plan.memory_inputs.chosen.get(one.key),
                after=one.to.value if one.to else view.base.memory_inputs.chosen.get(one.key),
                reason=problem,
                retry_in_s=retry_in_s,
            )

    # Deciding. Nothing here waits.

    def _sample_s(self) -> float:
        models = self._fleet.planner.entries
        settings = [self._fleet.planner.model_settings(name).slots for name in models]
        return min([_SAMPLE_S, *(one.sample_s for one in settings if one.follow_demand)])

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
        """Return what to change now; empty to complete a change, None for nothing."""
        changes = [one for decider in self._deciders for one in decider.changes(view)]
        if not view.is_idle and not any(change.is_urgent for change in changes):
            return None
        return changes if changes or self._is_uneven(view.name) else None

    def _forget(self) -> None:
        """Plan a model afresh that is not loaded any more, or whose instance failed."""
        if self._planner is not self._fleet.planner:
            self._planner, self._bases, self._retries = self._fleet.planner, BasePlans(), {}
        for name in self._adapted.models():
            model = self._fleet.models.get(name)
            if model is None or any(_has_ended(replica) for replica in model.replicas):
                self._adapted.set(name, {})

    def _view(self, model: Model) -> ModelView | None:
        name, replicas = model.entry.name, model.replicas
        plan = replicas[0].plan if replicas and all(map(_serves, replicas)) else None
        base = self._bases.of(self._fleet.planner, name, plan) if plan else None
        if plan is None or base is None:
            return None
        demand = self._router.demand(name)
        return ModelView(
            name=name,
            at_s=self._clock(),
            waiting=demand.waiting - demand.held,
            busy=demand.working,
            instances={one.name: one.instance.snapshot().pid or 0 for one in replicas},
            plan=plan,
            base=base,
            settings=self._fleet.planner.model_settings(name),
        )

    def _may_change(self, view: ModelView) -> bool:
        model, retry = self._fleet.models[view.name], self._retries.get(view.name)
        is_changing = bool(model.replacements or model.retiring)
        return not is_changing and (retry is None or retry.at_s <= view.at_s)

    def _is_uneven(self, name: str) -> bool:
        """Whether an instance runs without what another got, because its replacement failed."""
        wanted, trial_at = values(self._adapted.of(name)), self._fleet.planner.places.trial_at
        replicas = self._fleet.models[name].replicas
        plans = [one.plan for one in replicas if trial_at(one.place) is None]
        return any(plan and values(plan.adapted) != wanted for plan in plans)


def _serves(replica: Replica) -> bool:
    return replica.instance.snapshot().state is State.READY


def _has_ended(replica: Replica) -> bool:
    return replica.instance.snapshot().state in _ENDED
