"""Replaces the instances of a model so that they run with other values.

Each gets a successor beside it. Where memory does not hold both, or a successor fails, the rest
stays as it is. What the first one took applies to every later start of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from supervisor.adaptive.change import Change
from supervisor.adaptive.values import AdaptedValues
from supervisor.admission.evict import fits
from supervisor.admission.memory_usage import HOST, MemoryUsage
from supervisor.errors import CorralError
from supervisor.events import Emit
from supervisor.flags.plan import Plan
from supervisor.flags.setting import Settings
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launch_id import ReplicaId
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.reload.replace import Replacer, successor_bytes
from supervisor.reload.strategy import serves


class ChangeApplier:
    """Applies changes to models of a fleet; `adapted` has what was applied."""

    def __init__(
        self,
        fleet: Fleet,
        replacer: Replacer,
        memory_usage: MemoryUsage,
        adapted: AdaptedValues,
        emit: Emit,
    ) -> None:
        self._fleet = fleet
        self._replacer = replacer
        self._memory_usage = memory_usage
        self._adapted = adapted
        self._emit = emit

    async def apply(self, name: str, changes: Sequence[Change]) -> str | None:
        """Apply changes; return why that is not possible now, or None.

        Does nothing during a reload, after which they may not be wanted any more.
        """
        if self._replacer.lock.locked():
            return None
        async with self._replacer.lock:
            model = self._fleet.models.get(name)
            if model is None or not model.is_configured:
                return None
            to = merged(self._adapted.of(name), changes)
            planner, replicas = self._fleet.planner.adapting(name, to), model.replicas
            try:
                plans = await asyncio.to_thread(_plans, planner, [one.place for one in replicas])
            except CorralError as error:
                return error.message
            planned = [*zip(replicas, plans, strict=True)]
            if all(_runs(old, plan) for old, plan in planned):
                self._adapted.set(name, plans[0].adapted)
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
            self._keep(old.place)
        return None

    async def _replace(self, old: Replica, planner: LaunchPlanner, plan: Plan) -> str | None:
        """Return why it was not replaced: empty where it is not to serve any more."""
        if not self._has_room(old, plan):
            return f"memory does not hold a successor beside {old.name}"
        done = await self._replacer.replace_beside(old, planner, plan)
        if done.is_done:
            return None
        if done.failure:
            return f"{old.name} was not replaced: {done.failure.reason}"
        is_wanted = serves(old.instance.snapshot())
        return f"memory does not hold a successor beside {old.name}" if is_wanted else ""

    def _has_room(self, old: Replica, plan: Plan) -> bool:
        devices = {name: taken.total for name, taken in plan.estimate.devices.items()}
        required = {HOST: successor_bytes(old, plan) or 0, **devices}
        return fits(required, self._memory_usage.free())

    def _commit(self, changes: Iterable[Change], old: Replica, plan: Plan) -> None:
        self._adapted.set(plan.model, plan.adapted)
        before = old.plan.memory_inputs.chosen if old.plan else {}
        after = plan.memory_inputs.chosen
        for one in changes:
            self._emit(
                "model.adapted",
                model=plan.model,
                key=one.key,
                before=before.get(one.key),
                after=after.get(one.key),
                reason=one.reason,
            )

    def _keep(self, place: ReplicaId) -> None:
        """Have the new instance started again with what is planned then."""
        self._fleet.apply_settings(
            self._fleet.models[place.model].at(place.number), self._fleet.planner
        )


def merged(adapted: Settings, changes: Iterable[Change]) -> Settings:
    """Return the adapted values after these changes."""
    after = dict(adapted)
    for one in changes:
        after.pop(one.key, None)
        if one.to is not None:
            after[one.key] = one.to
    return after


def _plans(planner: LaunchPlanner, places: Iterable[ReplicaId]) -> list[Plan]:
    return [planner.plan_at(place) for place in places]


def _runs(replica: Replica, plan: Plan) -> bool:
    before = replica.plan
    return before is not None and before.memory_inputs.chosen == plan.memory_inputs.chosen
