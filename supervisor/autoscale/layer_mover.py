"""Moves layers between the workers of split models, on command or automatically.

The model loads again, and requests wait: a worker serves one engine at a time, so there is no
successor beside it. If it does not start with the new split, it starts with the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import define, field
from prometheus_client import Metric

from proxy.observe.metrics import counter, gauge
from supervisor.engine.states import State
from supervisor.errors import CorralError, SettingsInvalid, StartFailed
from supervisor.events import Emit, Part
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.replace import Replacer
from supervisor.plan.plan import Plan
from supervisor.plan.resolve import SPLIT
from supervisor.rpc.balance import Assignments, Rebalance
from supervisor.rpc.relay import ShardRun
from supervisor.rpc.shards import LayerShares, worker_split

_SAMPLE_S: Final = 5.0
_US_PER_S: Final = 1_000_000
# Requests wait for two loads at each failed attempt.
_RETRY_S: Final = 3600.0


# A completed move of a model, and the file that stores it.
Moved = tuple[str, Rebalance, Path]


@define(eq=False, slots=False)
class LayerMover(Part):
    """Moves layers of the models of a fleet; `shares` stores the layers of each worker."""

    task = "balance"
    serves_until = "drain"

    _fleet: Fleet
    _replacer: Replacer
    _shares: LayerShares
    _emit: Emit
    _clock: Callable[[], float]
    _not_before_s: dict[str, float] = field(factory=dict, init=False)

    def runs(self) -> Iterator[tuple[Replica, ShardRun]]:
        """Yield the serving instances that are split over workers."""
        for replica in self._fleet.replicas():
            if replica.shards and replica.instance.snapshot().state is State.READY:
                yield replica, replica.shards

    def metrics(self) -> Iterator[Metric]:
        """Yield the measurements of workers since each instance started."""
        found = {
            (replica.place.model, replica.name, name): its
            for replica, run in self.runs()
            for name, its in run.balancer.metrics.items()
        }
        used = {key: its for key, its in found.items() if its.total_forwards}
        yield counter("shard_forwards", {key: its.total_forwards for key, its in found.items()})
        seconds = {key: its.total_latency_us / _US_PER_S for key, its in found.items()}
        yield counter("shard_compute_seconds", seconds)
        for word in ("min", "max", "last"):
            times_us = {key: getattr(its, f"{word}_latency_us") for key, its in used.items()}
            times_s = {key: time_us / _US_PER_S for key, time_us in times_us.items()}
            yield gauge(f"shard_compute_{word}_seconds", times_s)
        yield gauge("shard_layers", {key: its.layer_count for key, its in found.items()})

    async def move(self, name: str) -> Moved | CorralError:
        """Move the layers of a model according to its measurements."""
        try:
            replica, run = self._find(name)
            decision = run.balancer.advice()
            if not isinstance(decision, Rebalance):
                raise SettingsInvalid(f"{name}: no layer is to be moved: {decision.reason}")
            return await self._move(replica, run, decision)
        except CorralError as error:
            return error

    async def undo(self, name: str) -> Moved | CorralError:
        """Undo the last move of a model's layers; a second call repeats the move."""
        try:
            replica, run = self._find(name)
            moved = await self._move(replica, run, self._back(name, run))
        except CorralError as error:
            return error
        self._not_before_s[name] = self._clock() + _RETRY_S
        return moved

    def _back(self, name: str, run: ShardRun) -> Rebalance:
        now = {plan.worker.name: plan.layers for plan in run.plans}
        before = self._shares.layers(name, now.keys(), sum(now.values()), before=True)
        if before is None or before == now:
            raise SettingsInvalid(
                f"no layers of {name} were moved between these workers",
                hint=f"corral balance {name} shows which should move",
            )
        after = tuple((worker, before[worker]) for worker in now)
        return Rebalance("the last move is undone", tuple(now.items()), after)

    async def serve(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_S)
            if self._fleet.planner.settings.balance.automatic:
                for replica, run in list(self.runs()):
                    await self.sample(replica, run)

    async def sample(self, replica: Replica, run: ShardRun) -> None:
        """Evaluate an instance, and move its layers if worthwhile."""
        name = replica.place.model
        if self._clock() < self._not_before_s.get(name, 0.0):
            return
        decision = run.balancer.evaluate()
        if not isinstance(decision, Rebalance):
            return
        try:
            await self._move(replica, run, decision)
        except CorralError as error:
            self._not_before_s[name] = self._clock() + _RETRY_S
            failure = {"reason": error.message, "retry_in_s": _RETRY_S}
            self._emit_move("model.adapt_failed", name, decision, **failure)

    def _find(self, name: str) -> tuple[Replica, ShardRun]:
        self._fleet.select([name])
        for replica, run in self.runs():
            if replica.place.model == name:
                return replica, run
        raise SettingsInvalid(
            f"{name} is not loaded, or has no workers", hint=f"corral load {name} loads it"
        )

    async def _move(self, replica: Replica, run: ShardRun, move: Rebalance) -> Moved:
        name, layers = replica.place.model, dict(move.suggested_assignments)
        async with self._replacer.lock:
            if replica.shards is not run:  # it was started again meanwhile
                reason = f"{replica.name} was started again; its workers are measured again"
                raise StartFailed(reason)
            planner = self._fleet.planner.with_layers(name, layers)
            plan = await asyncio.to_thread(planner.plan_at, replica.place)
            _check_split(plan, layers)
            failure = await self._replacer.replace(replica, planner, plan)
            if failure:
                hint = failure.cause.hint if failure.cause else None
                log = str(failure.log_path) if failure.log_path else None
                raise StartFailed(f"no layer was moved: {failure}", hint=hint, log=log)
            path = self._shares.write(name, layers, dict(move.current_assignments))
            current = self._fleet.models[name].at(replica.place.number)
            self._fleet.apply_settings(current, self._fleet.planner)
        self._emit_move("model.adapted", name, move, reason=move.reason)
        return name, move, path

    def _emit_move(self, event: str, model: str, move: Rebalance, **fields: object) -> None:
        before, after = _text(move.current_assignments), _text(move.suggested_assignments)
        self._emit(event, model=model, key=SPLIT, before=before, after=after, **fields)


def _check_split(plan: Plan, layers: Mapping[str, int]) -> None:
    """Raise CorralError if the plan has other workers, or a split from the settings."""
    if {worker.name for worker in plan.workers} != layers.keys():
        raise StartFailed(f"the workers of {plan.model} have changed; they are measured again")
    split = worker_split(plan.workers, layers)
    if (own := plan.memory_inputs.chosen.get(SPLIT)) != split:
        raise SettingsInvalid(
            f"{plan.model} has tensor-split = {own} in its settings, which stays",
            hint=f'set tensor-split = "{split}" there, or remove it; then corral reload',
        )


def _text(assignments: Assignments) -> str:
    return ", ".join(f"{name} {count}" for name, count in assignments)
